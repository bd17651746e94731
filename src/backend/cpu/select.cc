// SPDX-License-Identifier: MIT
// Select: a task per query head for its winners, then a task per KV head for their union.
#include <omp.h>

#include <algorithm>
#include <cassert>
#include <limits>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/scratch.h"

namespace fathom {
namespace {

void RunTopK(const cpu::KernelTable& k, const SelectArgs& a, std::int64_t i, std::int32_t* index,
             std::int32_t* key) {
  const SelectHead& head = a.heads[static_cast<std::size_t>(i / a.group)];
  const std::int64_t h = i % a.group;
  const cpu::TopKArgs args = {head.scores + h * head.stride + a.first,
                              a.last - a.first,
                              a.keep,
                              static_cast<std::int32_t>(a.first),
                              head.winners + h * a.keep,
                              index,
                              key};
  k.top_k(&args);
}

// Merges the ascending winners of the group: the smallest next token of any head goes out, and all
// heads that have it step on. No branch depends on the data.
std::int64_t MergeWinners(const SelectArgs& a, const SelectHead& head, std::int64_t n) {
  constexpr std::int32_t kEnd = std::numeric_limits<std::int32_t>::max();
  std::int32_t next[kMaxGroup] = {};
  const std::int32_t* at[kMaxGroup] = {};
  const std::int32_t* end[kMaxGroup] = {};
  for (int h = 0; h < a.group; ++h) {
    at[h] = head.winners + h * a.keep;
    end[h] = at[h] + a.keep;
    next[h] = a.keep > 0 ? *at[h] : kEnd;
  }
  for (;;) {
    std::int32_t token = next[0];
    for (int h = 1; h < a.group; ++h) token = std::min(token, next[h]);
    if (token == kEnd) return n;
    unsigned mask = 0;
    for (int h = 0; h < a.group; ++h) {
      const bool has = next[h] == token;
      mask |= static_cast<unsigned>(has) << h;
      at[h] += has ? 1 : 0;
      next[h] = at[h] < end[h] ? *at[h] : kEnd;
    }
    head.tokens[n] = token;
    head.mask[n++] = static_cast<std::uint16_t>(mask);
  }
}

std::int64_t AppendAlways(const SelectArgs& a, const SelectHead& head, std::int64_t from,
                          std::int64_t to, std::int64_t n) {
  const auto everyone = static_cast<std::uint16_t>((1u << a.group) - 1);
  for (std::int64_t i = from; i < to; ++i) {
    head.tokens[n] = static_cast<std::int32_t>(i);
    head.mask[n++] = everyone;
  }
  return n;
}

void Unite(const SelectArgs& a, const SelectHead& head) {
  std::int64_t n = AppendAlways(a, head, 0, a.first, 0);
  n = MergeWinners(a, head, n);
  *head.n_attended = AppendAlways(a, head, a.last, a.n_tokens, n);
}

}  // namespace

void CpuBackend::Select(const SelectArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup);
  assert(0 <= a.first && a.first <= a.last && a.last <= a.n_tokens);
  assert(0 <= a.keep && a.keep <= a.last - a.first);
  const auto n_heads = static_cast<std::int64_t>(a.heads.size());
  const std::int64_t n_query_heads = n_heads * a.group;
  const int team = Threads(n_query_heads);
  const std::size_t list =
      cpu::LineBytes<std::int32_t>(static_cast<std::size_t>(a.last - a.first + cpu::kSelectSlack));
  std::byte* scratch = cpu::Scratch::Take(2 * list * static_cast<std::size_t>(team));
#pragma omp parallel num_threads(team) if (team > 1)
  {
    std::byte* mine = scratch + 2 * list * static_cast<std::size_t>(omp_get_thread_num());
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < n_query_heads; ++i) {
      RunTopK(*kernels_, a, i, reinterpret_cast<std::int32_t*>(mine),
              reinterpret_cast<std::int32_t*>(mine + list));
    }
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < n_heads; ++i) Unite(a, a.heads[static_cast<std::size_t>(i)]);
  }
}

}  // namespace fathom
