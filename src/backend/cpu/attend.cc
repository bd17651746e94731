// SPDX-License-Identifier: MIT
// Attend: a task per KV head and chunk of rows, then a task per query head that joins the chunks in
// order. Chunk sizes depend on the kind of call only. Unfinished states are joined at once rather
// than by repeated MergeAttention: one exp per chunk and no division until the end.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/scratch.h"

namespace fathom {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

int ChunkRows(const AttendHead& head) {
  return head.tokens == nullptr ? cpu::kAttendDenseRows : cpu::kAttendListRows;
}

std::int64_t Chunks(const AttendHead& head) {
  return (head.n_attended + ChunkRows(head) - 1) / ChunkRows(head);
}

// Partial states of a call: chunks of head 0, then of head 1, ..; each out [group][D], top [group],
// sum [group].
struct Partials {
  float* data;
  std::size_t chunk_floats;

  float* chunk(std::int64_t i) const { return data + static_cast<std::size_t>(i) * chunk_floats; }
};

void RunChunk(const cpu::KernelTable& k, const AttendArgs& a, const AttendHead& head,
              std::int64_t chunk, float* state) {
  const std::int64_t first = chunk * ChunkRows(head);
  const bool dense = head.tokens == nullptr;
  const auto n =
      static_cast<std::int32_t>(std::min<std::int64_t>(head.n_attended - first, ChunkRows(head)));
  float* top = state + static_cast<std::size_t>(a.group) * static_cast<std::size_t>(a.head_dim);
  const cpu::AttendChunkArgs args = {dense ? head.rows + first * 2 * a.head_dim : head.rows,
                                     head.q,
                                     dense ? nullptr : head.tokens + first,
                                     dense ? nullptr : head.mask + first,
                                     n,
                                     a.head_dim,
                                     a.group,
                                     a.scale,
                                     state,
                                     top,
                                     top + a.group};
  (dense ? k.attend_dense : k.attend_listed)(&args);
}

// The chunks of one query head: out = sum e^(top_c - top) out_c / sum e^(top_c - top) sum_c.
void JoinChunks(const AttendArgs& a, const AttendHead& head, int h, const Partials& partials,
                std::int64_t first, std::int64_t n) {
  const std::size_t dim = static_cast<std::size_t>(a.head_dim);
  const std::size_t group = static_cast<std::size_t>(a.group);
  float* out = head.out + static_cast<std::size_t>(h) * dim;
  std::fill(out, out + dim, 0.0f);
  float top = kNothing;
  for (std::int64_t c = 0; c < n; ++c) {
    top = std::max(top, partials.chunk(first + c)[group * dim + static_cast<std::size_t>(h)]);
  }
  const float shift = top == kNothing ? 0 : top;
  double sum = 0;
  for (std::int64_t c = 0; c < n; ++c) {
    const float* state = partials.chunk(first + c);
    const float* tops = state + group * dim;
    const float weight = std::exp(tops[h] - shift);
    sum += static_cast<double>(weight) * tops[group + static_cast<std::size_t>(h)];
    const float* part = state + static_cast<std::size_t>(h) * dim;
    for (std::size_t d = 0; d < dim; ++d) out[d] += weight * part[d];
  }
  const auto inverse = static_cast<float>(sum == 0 ? 0 : 1 / sum);
  for (std::size_t d = 0; d < dim; ++d) out[d] *= inverse;
  head.lse[h] = sum == 0 ? kNothing : static_cast<float>(shift + std::log(sum));
}

}  // namespace

void CpuBackend::Attend(const AttendArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup);
  assert(a.head_dim > 0 && a.head_dim <= kMaxHeadDim && a.head_dim % 16 == 0);
  const auto n_heads = static_cast<std::int64_t>(a.heads.size());
  std::int64_t n_chunks = 0;
  for (const AttendHead& head : a.heads) n_chunks += Chunks(head);
  const auto group = static_cast<std::size_t>(a.group);
  const std::size_t state_floats =
      cpu::LineBytes<float>(group * (static_cast<std::size_t>(a.head_dim) + 2)) / sizeof(float);
  const std::size_t index_bytes = cpu::LineBytes<std::int64_t>(a.heads.size() + 1);
  std::byte* scratch = cpu::Scratch::Take(index_bytes + static_cast<std::size_t>(n_chunks) *
                                                            state_floats * sizeof(float));
  auto* first_chunk = reinterpret_cast<std::int64_t*>(scratch);
  const Partials partials = {reinterpret_cast<float*>(scratch + index_bytes), state_floats};
  first_chunk[0] = 0;
  for (std::int64_t i = 0; i < n_heads; ++i) {
    first_chunk[i + 1] = first_chunk[i] + Chunks(a.heads[static_cast<std::size_t>(i)]);
  }
#pragma omp parallel num_threads(Team(n_chunks)) if (n_chunks > 1)
  {
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < n_chunks; ++i) {
      const std::int64_t* next = std::upper_bound(first_chunk, first_chunk + n_heads + 1, i);
      const std::int64_t at = next - first_chunk - 1;
      RunChunk(*kernels_, a, a.heads[static_cast<std::size_t>(at)], i - first_chunk[at],
               partials.chunk(i));
    }
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < n_heads * a.group; ++i) {
      const std::int64_t at = i / a.group;
      JoinChunks(a, a.heads[static_cast<std::size_t>(at)], static_cast<int>(i % a.group), partials,
                 first_chunk[at], first_chunk[at + 1] - first_chunk[at]);
    }
  }
}

}  // namespace fathom
