#include "kv_cache.h"

#include <cstring>
#include <new>
#include <stdexcept>

#include "program.h"

namespace thinfer {

KvCache::KvCache(int layers, int kv_heads, int head_dim, bool half)
    : layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim), half_(half), element_(half ? 2 : 4) {
  if (layers < 1 || kv_heads < 1 || head_dim < 1 || head_dim > 1024 || layers > 100000 || kv_heads > 100000) {
    throw std::invalid_argument("a KV cache needs layers, kv_heads and head_dim of at least 1, head_dim up to 1024");
  }
  // Both kinds of plane start on 64-byte boundaries: 64 positions of f16 are 128 bytes.
  key_bytes_ = static_cast<size_t>(head_dim) * kBlock * element_;
  value_bytes_ = static_cast<size_t>(padded(head_dim)) * kBlock * element_;
  block_bytes_ = static_cast<size_t>(layers) * static_cast<size_t>(kv_heads) * (key_bytes_ + value_bytes_);
}

void KvCache::ensure_blocks(int count) {
  if (count <= blocks()) return;
  const auto missing = static_cast<size_t>(count - blocks());
  if (missing > SIZE_MAX / 4 / block_bytes_) throw std::bad_alloc();
  bases_.reserve(static_cast<size_t>(count));
  Pages slab(missing * block_bytes_);
  for (size_t i = 0; i < missing; ++i) bases_.push_back(slab.data() + i * block_bytes_);
  slabs_.push_back(std::move(slab));
}

void KvCache::copy_block(int from, int to) { std::memcpy(block(to), block(from), block_bytes_); }

size_t KvCache::key_offset(int layer, int kv_head) const {
  const auto heads = static_cast<size_t>(kv_heads_);
  return static_cast<size_t>(layer) * heads * (key_bytes_ + value_bytes_) + static_cast<size_t>(kv_head) * key_bytes_;
}

size_t KvCache::value_offset(int layer, int kv_head) const {
  const auto heads = static_cast<size_t>(kv_heads_);
  return static_cast<size_t>(layer) * heads * (key_bytes_ + value_bytes_) + heads * key_bytes_ +
         static_cast<size_t>(kv_head) * value_bytes_;
}

}  // namespace thinfer
