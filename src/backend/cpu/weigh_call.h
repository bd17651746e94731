// SPDX-License-Identifier: MIT
// Weigh: chunks of kWeighChunkBlocks blocks of a KV head are tasks; then a task per query head
// joins the chunks in order.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>

#include "backend/cpu/kernels.h"
#include "backend/cpu/scratch.h"
#include "fathom/backend.h"

namespace fathom::cpu {

class WeighCall {
 public:
  // mass_stride: from the masses of one query head to those of the next.
  WeighCall(const KernelTable& kernels, const WeighArgs& args, std::int64_t mass_stride)
      : k_(kernels),
        a_(args),
        mass_stride_(mass_stride),
        chunks_((args.n_blocks + kWeighChunkBlocks - 1) / kWeighChunkBlocks),
        stride_(static_cast<std::int64_t>(
            LineBytes<float>(static_cast<std::size_t>(args.group * (args.head_dim + 1) + 1)) /
            sizeof(float))) {
    assert(args.group > 0 && args.group <= kMaxGroup);
    assert(args.head_dim > 0 && args.head_dim <= kMaxHeadDim && args.head_dim % 16 == 0);
  }

  std::int64_t n_tasks() const { return chunks_ * static_cast<std::int64_t>(a_.heads.size()); }
  std::int64_t n_query_heads() const {
    return a_.group * static_cast<std::int64_t>(a_.heads.size());
  }
  std::int64_t head_of(std::int64_t task) const { return task / chunks_; }
  // Blocks of a task, of its KV head.
  std::int64_t first_block(std::int64_t task) const { return task % chunks_ * kWeighChunkBlocks; }
  std::int64_t n_blocks(std::int64_t task) const {
    return std::min<std::int64_t>(a_.n_blocks - first_block(task), kWeighChunkBlocks);
  }

  std::size_t ScratchBytes() const {
    return static_cast<std::size_t>(n_tasks() * stride_) * sizeof(float);
  }
  void UseScratch(std::byte* scratch) { parts_ = reinterpret_cast<float*>(scratch); }

  // least: [group] of the task's KV head.
  void Run(std::int64_t task, const float* least) const {
    const WeighHead& head = a_.heads[static_cast<std::size_t>(head_of(task))];
    const std::int64_t first = first_block(task);
    const Part part = PartOf(task);
    const WeighBlocksArgs args = {
        head.means == nullptr ? nullptr : head.means + first * a_.head_dim,
        head.mass + first,
        least,
        mass_stride_,
        static_cast<std::int32_t>(n_blocks(task)),
        a_.head_dim,
        a_.group,
        part.out,
        part.other,
        part.n_read};
    k_.weigh_blocks(&args);
  }

  void Join(std::int64_t query_head) const {
    const std::int64_t kv = query_head / a_.group;
    const std::int64_t h = query_head % a_.group;
    const WeighHead& head = a_.heads[static_cast<std::size_t>(kv)];
    const std::int64_t dim = a_.head_dim;
    float* out = head.out + h * dim;
    std::fill(out, out + dim, 0.0f);
    double other = 0;
    std::int64_t n_read = 0;
    for (std::int64_t c = kv * chunks_; c < (kv + 1) * chunks_; ++c) {
      const Part part = PartOf(c);
      for (std::int64_t d = 0; d < dim; ++d) out[d] += part.out[h * dim + d];
      other += part.other[h];
      n_read += *part.n_read;
    }
    for (std::int64_t d = 0; d < dim; ++d) out[d] += static_cast<float>(other * head.mean[d]);
    if (h == 0 && head.n_read != nullptr) *head.n_read = n_read;
  }

 private:
  // What one task leaves: out [group][head_dim], other [group], n_read.
  struct Part {
    float* out;
    float* other;
    std::int32_t* n_read;
  };

  Part PartOf(std::int64_t task) const {
    float* out = parts_ + task * stride_;
    float* other = out + std::int64_t{a_.group} * a_.head_dim;
    return {out, other, reinterpret_cast<std::int32_t*>(other + a_.group)};
  }

  const KernelTable& k_;
  const WeighArgs& a_;
  const std::int64_t mass_stride_;
  const std::int64_t chunks_;  // of a KV head
  const std::int64_t stride_;  // of parts, in floats
  float* parts_ = nullptr;     // [n_tasks][stride]
};

}  // namespace fathom::cpu
