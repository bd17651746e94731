// SPDX-License-Identifier: MIT
// Mass: every block is summed by itself, so tasks are any ranges of blocks of a query head. A task
// also takes out the listed tokens of its range, whose scores it reads anyway: done by one thread
// for all, those scattered writes to other cores' lines cost more than all the sums.
#include <algorithm>
#include <cassert>
#include <limits>

#include "backend/cpu/cpu_backend.h"

namespace fathom {
namespace {

void TakeOut(const MassHead& head, std::int64_t h, std::int64_t first, std::int64_t last) {
  const std::int32_t* end = head.tokens + head.n_listed;
  float* scores = head.scores + h * head.stride;
  for (const std::int32_t* t = std::lower_bound(head.tokens, end, first); t < end && *t < last;
       ++t) {
    if ((head.mask[t - head.tokens] >> h & 1) != 0) {
      scores[*t] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace

void CpuBackend::Mass(const MassArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup && a.scale > 0);
  constexpr std::int64_t kChunk = cpu::kMassChunkBlocks;
  const std::int64_t chunks = (a.n_blocks + kChunk - 1) / kChunk;
  const std::int64_t n = chunks * a.group * static_cast<std::int64_t>(a.heads.size());
#pragma omp parallel for schedule(dynamic) num_threads(Threads(n)) if (n > 1)
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t query_head = i / chunks;
    const MassHead& head = a.heads[static_cast<std::size_t>(query_head / a.group)];
    const std::int64_t h = query_head % a.group;
    const std::int64_t first = i % chunks * kChunk;
    const std::int64_t blocks = std::min(a.n_blocks - first, kChunk);
    TakeOut(head, h, first * kBlockTokens, (first + blocks) * kBlockTokens);
    const cpu::MassBlocksArgs args = {head.scores + h * head.stride + first * kBlockTokens, blocks,
                                      a.scale, head.shift[h], head.mass + h * a.n_blocks + first};
    kernels_->mass_blocks(&args);
  }
}

}  // namespace fathom
