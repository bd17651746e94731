// SPDX-License-Identifier: MIT
// Prefill: a task per KV head and tile of query positions, the longest first.
#include <omp.h>

#include <algorithm>
#include <cassert>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/scratch.h"

namespace fathom {
namespace {

// Rows of a tile share one packing of the keys; with Q, O and a packed tile they should fit in half
// a megabyte of second-level cache.
constexpr int kTileRows = 256;
constexpr int kTileRowsWide = 128;  // head_dim above 128
constexpr int kLeastPositions = 16;
constexpr int kTilesWanted = 8;  // of a short chunk, so that threads have work

int TilePositions(const PrefillArgs& a) {
  const int rows = a.geometry.head_dim > 128 ? kTileRowsWide : kTileRows;
  const int most = std::max(1, rows / std::max(1, a.geometry.group()));
  const std::int64_t share = (a.n_queries + kTilesWanted - 1) / kTilesWanted;
  const auto wanted = static_cast<int>(std::clamp<std::int64_t>(share, kLeastPositions, kTileRows));
  return std::min(most, wanted);
}

}  // namespace

void CpuBackend::Prefill(const PrefillArgs& a) const {
  const HeadGeometry& g = a.geometry;
  assert(g.n_kv_heads > 0 && g.n_heads % g.n_kv_heads == 0 && g.group() <= kMaxGroup);
  assert(g.head_dim > 0 && g.head_dim <= kMaxHeadDim && g.head_dim % 16 == 0);
  const int positions = TilePositions(a);
  const std::int64_t tiles = (a.n_queries + positions - 1) / positions;
  const std::int64_t n = tiles * g.n_kv_heads;
  const int team = Threads(n);
  const std::int64_t stride = static_cast<std::int64_t>(g.n_heads) * g.head_dim;
  const std::size_t part = cpu::LineBytes<float>(
      static_cast<std::size_t>(kernels_->prefill_scratch(positions * g.group(), g.head_dim)));
  std::byte* scratch = cpu::Scratch::Take(part * static_cast<std::size_t>(team));
#pragma omp parallel for schedule(dynamic) num_threads(team) if (team > 1)
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t kv_head = i % g.n_kv_heads;
    const std::int64_t t = (tiles - 1 - i / g.n_kv_heads) * positions;
    const std::int64_t at = t * stride + kv_head * g.group() * g.head_dim;
    std::byte* mine = scratch + part * static_cast<std::size_t>(omp_get_thread_num());
    const cpu::PrefillTileArgs args = {
        a.rows[static_cast<std::size_t>(kv_head)],
        a.q + at,
        a.out + at,
        stride,
        a.first + t,
        static_cast<std::int32_t>(std::min<std::int64_t>(positions, a.n_queries - t)),
        g.head_dim,
        g.group(),
        a.scale,
        reinterpret_cast<float*>(mine)};
    kernels_->prefill_tile(&args);
  }
}

}  // namespace fathom
