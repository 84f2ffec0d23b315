#include "memory.h"

#include <cmath>
#include <cstring>
#include <new>
#include <utility>

#include "check.h"
#include "half.h"

void test_memory() {
  using thinfer::Pages;
  CHECK(Pages(0).data() == nullptr);
  Pages small(100);
  CHECK(reinterpret_cast<uintptr_t>(small.data()) % 64 == 0 && small.size() == 100);
  Pages large((size_t{5} << 20) + 3);
  CHECK(reinterpret_cast<uintptr_t>(large.data()) % (size_t{2} << 20) == 0);
  for (size_t i = 0; i < large.size(); i += 4095) CHECK(large.data()[i] == 0);
  large.data()[large.size() - 1] = 7;
  Pages moved(std::move(large));
  CHECK(moved.data()[moved.size() - 1] == 7 && large.data() == nullptr);
  small = std::move(moved);
  CHECK(small.data()[small.size() - 1] == 7);
  CHECK_THROWS(std::bad_alloc, Pages(SIZE_MAX));
}

// All 65536 halves come back; values between two neighbours round to the nearer, ties to the even one.
void test_half() {
  using namespace thinfer;
  for (uint32_t h = 0; h < 0x10000u; ++h) {
    const auto half = static_cast<uint16_t>(h);
    const float value = half_to_float(half);
    const bool nan = (h & 0x7c00u) == 0x7c00u && (h & 0x3ffu) != 0;
    CHECK(std::isnan(value) == nan);
    CHECK(float_to_half(value) == (nan ? (half | 0x200u) : half));
    if ((h & 0x7fffu) >= 0x7bffu) continue;
    const float next = half_to_float(static_cast<uint16_t>(h + 1));
    const float middle = value + (next - value) / 2;
    const auto even = static_cast<uint16_t>(h & 1 ? h + 1 : h);
    CHECK(float_to_half(middle) == even);
    CHECK(float_to_half(std::nextafterf(middle, value)) == half);
    CHECK(float_to_half(std::nextafterf(middle, next)) == h + 1);
  }
  CHECK(float_to_half(65519.0f) == 0x7bff && float_to_half(65520.0f) == 0x7c00 && float_to_half(-1e30f) == 0xfc00);
}
