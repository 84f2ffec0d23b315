// Keys and values of all layers in blocks of 64 positions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace thinfer {

// A block holds, for each layer, keys [kv_heads][head_dim][64] and then values [kv_heads][64][head_dim padded to 16],
// in f16 or f32. Keys are transposed so that 16 positions are one vector. Memory becomes resident as it is written.
class KvCache {
 public:
  // Throws std::invalid_argument when a size is below 1 or head_dim above 1024.
  KvCache(int layers, int kv_heads, int head_dim, bool half);

  int layers() const { return layers_; }
  int kv_heads() const { return kv_heads_; }
  int head_dim() const { return head_dim_; }
  bool half() const { return half_; }
  int blocks() const { return static_cast<int>(bases_.size()); }
  size_t block_bytes() const { return block_bytes_; }

  // Grows to at least `count` blocks, new ones zero. Throws std::bad_alloc. Not during a step.
  void ensure_blocks(int count);
  void copy_block(int from, int to);

  uint8_t* block(int index) const { return bases_[static_cast<size_t>(index)]; }
  uint8_t* const* bases() const { return bases_.data(); }
  // Bytes from a block's base to the keys and values of a layer and kv head.
  size_t key_offset(int layer, int kv_head) const;
  size_t value_offset(int layer, int kv_head) const;

 private:
  int layers_;
  int kv_heads_;
  int head_dim_;
  bool half_;
  size_t element_;
  size_t key_bytes_;    // of one kv head
  size_t value_bytes_;  // of one kv head
  size_t block_bytes_;
  std::vector<Pages> slabs_;
  std::vector<uint8_t*> bases_;
};

}  // namespace thinfer
