#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace thinfer {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;
}  // namespace

Pages::Pages(size_t bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  const bool huge = bytes >= kHugePage;
  const size_t alignment = huge ? kHugePage : kPage;
  const size_t rounded = (bytes + kPage - 1) & ~(kPage - 1);
  mapped_ = rounded + (huge ? kHugePage : 0);
  void* mapping = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    mapped_ = 0;
    throw std::bad_alloc();
  }
  mapping_ = mapping;
  const auto address = reinterpret_cast<uintptr_t>(mapping);
  data_ = reinterpret_cast<uint8_t*>((address + alignment - 1) & ~(alignment - 1));
  size_ = bytes;
#ifdef MADV_HUGEPAGE
  if (huge) madvise(data_, rounded, MADV_HUGEPAGE);  // a wish: a kernel without huge pages serves small ones
#endif
}

Pages::~Pages() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(std::exchange(other.mapped_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

uint8_t* Arena::take(size_t bytes) {
  constexpr size_t kSlab = 32u << 20;
  const size_t rounded = (bytes + 63) & ~size_t{63};
  if (slabs_.empty() || slabs_.back().size() - used_ < rounded) {
    slabs_.emplace_back(rounded > kSlab ? rounded : kSlab);
    used_ = 0;
  }
  uint8_t* piece = slabs_.back().data() + used_;
  used_ += rounded;
  return piece;
}

}  // namespace thinfer
