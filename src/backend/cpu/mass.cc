// SPDX-License-Identifier: MIT
// Mass: every block is summed by itself, so tasks are any ranges of blocks of a query head.
#include <algorithm>
#include <cassert>

#include "backend/cpu/cpu_backend.h"

namespace fathom {

void CpuBackend::Mass(const MassArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup && a.scale > 0);
  constexpr std::int64_t kChunk = cpu::kMassChunkBlocks;
  const std::int64_t chunks = (a.n_blocks + kChunk - 1) / kChunk;
  const std::int64_t n = chunks * a.group * static_cast<std::int64_t>(a.heads.size());
#pragma omp parallel for schedule(dynamic) num_threads(Team(n)) if (n > 1)
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t query_head = i / chunks;
    const MassHead& head = a.heads[static_cast<std::size_t>(query_head / a.group)];
    const std::int64_t h = query_head % a.group;
    const std::int64_t first = i % chunks * kChunk;
    const cpu::MassBlocksArgs args = {head.scores + h * head.stride + first * kBlockTokens,
                                      std::min(a.n_blocks - first, kChunk), a.scale, head.shift[h],
                                      head.mass + h * a.n_blocks + first};
    kernels_->mass_blocks(&args);
  }
}

}  // namespace fathom
