// Zeroed anonymous memory on huge pages: packed weights, the KV cache and large buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace thinfer {

// Owns `bytes` of zeroed memory aligned to 2 MiB when that large (else to 64 bytes); pages become resident when
// first written. Throws std::bad_alloc.
class Pages {
 public:
  Pages() = default;
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
};

// Hands out pieces of large Pages, so that many small matrices share 2 MiB pages. Nothing is given back before the end.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  // `bytes` of zeroed memory on a cache line. Throws std::bad_alloc. One thread at a time.
  uint8_t* take(size_t bytes);

 private:
  std::vector<Pages> slabs_;
  size_t used_ = 0;  // of the last slab
};

}  // namespace thinfer
