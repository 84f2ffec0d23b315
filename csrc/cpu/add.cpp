#include "cpu/isa/simd.h"
#include "cpu/ops.h"

namespace thinfer::THINFER_ISA {

void add_rows(const float* a, const float* b, float* out, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, add(load(a + i), load(b + i)));
  if (i < n) store_n(out + i, add(load_n(a + i, n - i), load_n(b + i, n - i)), n - i);
}

}  // namespace thinfer::THINFER_ISA
