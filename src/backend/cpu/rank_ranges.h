// SPDX-License-Identifier: MIT
// How Rank divides the blocks of all KV heads among the threads of a team.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/cpu/kernels.h"
#include "fathom/backend.h"

namespace fathom::cpu {

// Every thread has one range of neighbouring blocks, of one KV head or of several.
class RankRanges {
 public:
  // Consecutive blocks of one segment.
  struct Piece {
    const SegmentView* segment;
    const SegmentView* next;  // that the range goes on with, or null
    std::int64_t block;       // of the head
    std::int32_t first;       // of the segment
    std::int32_t count;
  };

  explicit RankRanges(std::span<const RankHead> heads) : heads_(heads) {
    if (heads.empty()) return;
    for (const SegmentView& s : heads[0].segments) n_blocks_ += s.n_blocks;
    units_ = (n_blocks_ + kUnitBlocks - 1) / kUnitBlocks;
  }

  std::int64_t n_blocks() const { return n_blocks_; }  // of every KV head

  // fn(kv, piece) for the blocks of a thread, in order.
  template <typename Fn>
  void ForRange(int thread, int team, const Fn& fn) const {
    const std::int64_t all = units_ * static_cast<std::int64_t>(heads_.size());
    const std::int64_t begin = all * thread / team;
    const std::int64_t end = all * (thread + 1) / team;
    for (std::int64_t kv = begin / std::max<std::int64_t>(units_, 1); kv * units_ < end; ++kv) {
      const std::int64_t from = std::max(begin - kv * units_, std::int64_t{0}) * kUnitBlocks;
      const std::int64_t to = std::min((end - kv * units_) * kUnitBlocks, n_blocks_);
      const auto segments = heads_[static_cast<std::size_t>(kv)].segments;
      std::int64_t at = 0;  // first block of the segment
      for (std::size_t s = 0; s < segments.size() && at < to; at += segments[s].n_blocks, ++s) {
        const std::int64_t last = std::min<std::int64_t>(to - at, segments[s].n_blocks);
        const bool more = at + segments[s].n_blocks < to && s + 1 < segments.size();
        std::int64_t b = std::max<std::int64_t>(from - at, 0);
        // Kernels take an even first block.
        for (; b < last; b += kScanChunkBlocks) {
          const auto count = std::min<std::int64_t>(last - b, kScanChunkBlocks);
          fn(kv, Piece{&segments[s], more ? &segments[s + 1] : nullptr, at + b,
                       static_cast<std::int32_t>(b), static_cast<std::int32_t>(count)});
        }
      }
    }
  }

  // First token of a thread's range in a KV head; that of the next range where it has none there.
  std::int64_t Begin(int thread, int team, std::int64_t kv) const {
    const std::int64_t all = units_ * static_cast<std::int64_t>(heads_.size());
    const std::int64_t unit =
        std::clamp<std::int64_t>(all * thread / team - kv * units_, 0, units_);
    return std::min(unit * kUnitBlocks, n_blocks_) * kBlockTokens;
  }

 private:
  static constexpr std::int64_t kUnitBlocks = 8;  // a cache line of every plane

  std::span<const RankHead> heads_;
  std::int64_t n_blocks_ = 0;
  std::int64_t units_ = 0;  // of a KV head
};

}  // namespace fathom::cpu
