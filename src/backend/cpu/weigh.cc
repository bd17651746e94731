// SPDX-License-Identifier: MIT
// Weigh: chunks of kWeighChunkBlocks blocks of a KV head are tasks; then a task per query head
// joins the chunks in order. Few blocks are left to the calling thread: a parallel region costs
// more.
#include <algorithm>
#include <cassert>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/scratch.h"
#include "backend/cpu/team.h"

namespace fathom {
namespace {

// What one chunk leaves: out [group][head_dim], other [group], n_read.
struct Part {
  float* out;
  float* other;
  std::int32_t* n_read;
};

struct Parts {
  float* data;
  std::int64_t stride;  // floats
  std::int64_t group;
  std::int64_t dim;

  Part at(std::int64_t i) const {
    float* out = data + i * stride;
    float* other = out + group * dim;
    return {out, other, reinterpret_cast<std::int32_t*>(other + group)};
  }
};

void JoinParts(const WeighHead& head, std::int64_t h, const Parts& parts, std::int64_t first,
               std::int64_t n) {
  float* out = head.out + h * parts.dim;
  std::fill(out, out + parts.dim, 0.0f);
  double other = 0;
  std::int64_t n_read = 0;
  for (std::int64_t c = first; c < first + n; ++c) {
    const Part part = parts.at(c);
    for (std::int64_t d = 0; d < parts.dim; ++d) out[d] += part.out[h * parts.dim + d];
    other += part.other[h];
    n_read += *part.n_read;
  }
  for (std::int64_t d = 0; d < parts.dim; ++d) {
    out[d] += static_cast<float>(other * head.mean[d]);
  }
  if (h == 0 && head.n_read != nullptr) *head.n_read = n_read;
}

}  // namespace

void CpuBackend::Weigh(const WeighArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup);
  assert(a.head_dim > 0 && a.head_dim <= kMaxHeadDim && a.head_dim % 16 == 0);
  constexpr std::int64_t kChunk = cpu::kWeighChunkBlocks;
  constexpr std::int64_t kFewChunks = 4;
  const std::int64_t chunks = (a.n_blocks + kChunk - 1) / kChunk;
  const auto n_heads = static_cast<std::int64_t>(a.heads.size());
  const std::int64_t n = chunks * n_heads;
  const std::size_t part_bytes =
      cpu::LineBytes<float>(static_cast<std::size_t>(a.group * (a.head_dim + 1) + 1));
  const int threads = n > kFewChunks ? Threads(n) : 1;
  const std::size_t team_bytes = cpu::Team::Bytes(threads);
  std::byte* scratch = cpu::Scratch::Take(team_bytes + part_bytes * static_cast<std::size_t>(n));
  const Parts parts = {reinterpret_cast<float*>(scratch + team_bytes),
                       static_cast<std::int64_t>(part_bytes / sizeof(float)), a.group, a.head_dim};
  cpu::Team(threads, spins_, scratch).Run([&](const cpu::Team::Member& m) {
    m.ForMine(n, [&](std::int64_t i) {
      const WeighHead& head = a.heads[static_cast<std::size_t>(i / chunks)];
      const std::int64_t first = i % chunks * kChunk;
      const Part part = parts.at(i);
      const cpu::WeighBlocksArgs args = {
          head.means == nullptr ? nullptr : head.means + first * a.head_dim,
          head.mass + first,
          head.least,
          a.n_blocks,
          static_cast<std::int32_t>(std::min(a.n_blocks - first, kChunk)),
          a.head_dim,
          a.group,
          part.out,
          part.other,
          part.n_read};
      kernels_->weigh_blocks(&args);
    });
    m.Wait();
    m.ForMine(n_heads * a.group, [&](std::int64_t i) {
      const std::int64_t at = i / a.group;
      JoinParts(a.heads[static_cast<std::size_t>(at)], i % a.group, parts, at * chunks, chunks);
    });
  });
}

}  // namespace fathom
