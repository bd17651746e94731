// SPDX-License-Identifier: MIT
// Attend over the rows of all heads, by the threads of a team: rows are cut into chunks whose sizes
// depend on the kind of call only. A thread takes neighbouring chunks, so that a kernel fetches the
// next while it computes, and leaves a softmax state for each; a task per query head joins them in
// order. Unfinished states are joined at once rather than by repeated MergeAttention: one exp per
// chunk and no division until the end.
//
// Lazy values need a lower bound of each head's lse before the first value is read: each thread
// scores the first and last rows for itself, which costs less than a barrier.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

#include "backend/cpu/kernels.h"
#include "backend/cpu/scratch.h"
#include "fathom/backend.h"

namespace fathom::cpu {

// What chunks leave, those of KV head 0 first.
struct AttendParts {
  float* out;              // [n_chunks][group][head_dim]
  float* top;              // [n_chunks][group]
  float* sum;              // [n_chunks][group]
  float* light;            // [n_chunks][group] (listed rows)
  std::int32_t* n_values;  // [n_chunks] (listed rows)
};

class AttendCall {
 public:
  AttendCall(const KernelTable& kernels, const AttendArgs& args)
      : k_(kernels), a_(args), group_(args.group), dim_(args.head_dim) {
    assert(args.group > 0 && args.group <= kMaxGroup);
    assert(args.head_dim > 0 && args.head_dim <= kMaxHeadDim && args.head_dim % 16 == 0);
  }

  // Of as many rows as the heads have now, and of fewer.
  std::int64_t MostChunks() const {
    std::int64_t most = 0;
    for (const AttendHead& head : a_.heads) most += MostChunksOf(head);
    return most;
  }

  // For the same.
  std::size_t ScratchBytes() const {
    return IndexBytes() + OutBytes(MostChunks()) + 4 * PartBytes(MostChunks());
  }
  // After this the heads' rows stay as they are.
  void UseScratch(std::byte* at) {
    const auto take = [&at](std::size_t bytes) {
      at += bytes;
      return reinterpret_cast<float*>(at - bytes);
    };
    first_chunk_ = reinterpret_cast<std::int64_t*>(take(IndexBytes()));
    first_chunk_[0] = 0;
    for (std::size_t i = 0; i < a_.heads.size(); ++i) {
      first_chunk_[i + 1] = first_chunk_[i] + Chunks(a_.heads[i]);
    }
    const std::int64_t n = n_chunks();
    p_ = {take(OutBytes(n)), take(PartBytes(n)), take(PartBytes(n)), take(PartBytes(n)),
          reinterpret_cast<std::int32_t*>(take(PartBytes(n)))};
  }

  std::int64_t n_chunks() const { return first_chunk_[a_.heads.size()]; }
  std::int64_t n_query_heads() const { return static_cast<std::int64_t>(a_.heads.size()) * group_; }

  // Chunks first .. last - 1 of all.
  void Run(std::int64_t first, std::int64_t last) const {
    for (std::size_t i = 0; i < a_.heads.size(); ++i) {
      const AttendHead& head = a_.heads[i];
      const std::int64_t from = std::max(first, first_chunk_[i]);
      const std::int64_t to = std::min(last, first_chunk_[i + 1]);
      if (from >= to) continue;
      if (head.tokens != nullptr) {
        RunListed(head, from - first_chunk_[i], to - from, from);
        continue;
      }
      for (std::int64_t c = from; c < to; ++c) RunDense(head, c - first_chunk_[i], c);
    }
  }

  void Join(std::int64_t query_head) const {
    const std::size_t i = Size(query_head / group_);
    const std::int64_t h = query_head % group_;
    const AttendHead& head = a_.heads[i];
    const Softmax whole = WholeOf(first_chunk_[i], Chunks(head), h);
    JoinStates(head, first_chunk_[i], h, whole);
    head.lse[h] = whole.sum == 0 ? kNothing : static_cast<float>(whole.shift + std::log(whole.sum));
    if (h == 0 && head.n_values != nullptr) *head.n_values = Values(head, first_chunk_[i]);
  }

 private:
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();

  // The state of one query head over all of its chunks.
  struct Softmax {
    float shift;  // the largest score, or 0 without any
    double sum;   // of exp(score - shift)
  };

  static std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

  // Listed rows are cut into a power of two of equal chunks, so that few KV heads keep many threads
  // equally busy.
  static std::int64_t MostChunksOf(const AttendHead& head) {
    if (head.tokens == nullptr) {
      return (head.n_attended + kAttendDenseRows - 1) / kAttendDenseRows;
    }
    std::int64_t chunks = 1;
    while (chunks * kAttendListRows < head.n_attended) chunks *= 2;
    return chunks;
  }
  static std::int64_t ChunkRows(const AttendHead& head) {
    if (head.tokens == nullptr) return kAttendDenseRows;
    const std::int64_t chunks = MostChunksOf(head);
    return std::max<std::int64_t>((head.n_attended + chunks - 1) / chunks, 1);
  }
  static std::int64_t Chunks(const AttendHead& head) {
    const std::int64_t rows = ChunkRows(head);
    return (head.n_attended + rows - 1) / rows;
  }

  std::size_t IndexBytes() const { return LineBytes<std::int64_t>(a_.heads.size() + 1); }
  std::size_t OutBytes(std::int64_t chunks) const {
    return LineBytes<float>(Size(chunks * group_ * dim_));
  }
  std::size_t PartBytes(std::int64_t chunks) const {
    return LineBytes<float>(Size(chunks * group_));
  }

  void RunDense(const AttendHead& head, std::int64_t chunk, std::int64_t at) const {
    const std::int64_t first = chunk * kAttendDenseRows;
    const auto n = static_cast<std::int32_t>(
        std::min<std::int64_t>(head.n_attended - first, kAttendDenseRows));
    const AttendDenseArgs args = {head.rows + first * 2 * dim_,
                                  head.q,
                                  n,
                                  a_.head_dim,
                                  a_.group,
                                  a_.scale,
                                  p_.out + at * group_ * dim_,
                                  p_.top + at * group_,
                                  p_.sum + at * group_};
    k_.attend_dense(&args);
  }

  // n chunks of a KV head; the first is chunk `chunk` of the head and chunk `at` of all.
  void RunListed(const AttendHead& head, std::int64_t chunk, std::int64_t n,
                 std::int64_t at) const {
    float limit[kMaxGroup];
    if (a_.least_weight > 0) FindLimits(head, limit);
    const std::int64_t rows = ChunkRows(head);
    const std::int64_t first = chunk * rows;
    const std::int64_t small = at * group_;
    const AttendListArgs args = {head.rows,
                                 head.q,
                                 head.tokens + first,
                                 head.mask + first,
                                 std::min(head.n_attended - first, n * rows),
                                 static_cast<std::int32_t>(rows),
                                 a_.head_dim,
                                 a_.group,
                                 a_.scale,
                                 p_.out + small * dim_,
                                 p_.top + small,
                                 p_.sum + small,
                                 a_.least_weight > 0 ? limit : nullptr,
                                 p_.light + small,
                                 p_.n_values + at};
    k_.attend_listed(&args);
  }

  // limit: [group] base_h + log(least_weight).
  void FindLimits(const AttendHead& head, float* limit) const {
    constexpr std::int64_t kEnds = kSinks + kWindow;
    std::int32_t tokens[kEnds];
    std::uint16_t mask[kEnds];
    const std::int64_t n = std::min(head.n_attended, kEnds);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t from = i < kSinks ? i : head.n_attended - n + i;
      tokens[i] = head.tokens[from];
      mask[i] = head.mask[from];
    }
    float top[kMaxGroup];
    float sum[kMaxGroup];
    const AttendListArgs args = {head.rows, head.q,      tokens,   mask,     n,
                                 kEnds,     a_.head_dim, a_.group, a_.scale, nullptr,
                                 top,       sum,         nullptr,  nullptr,  nullptr};
    k_.attend_keys(&args);
    for (std::int64_t h = 0; h < group_; ++h) {
      limit[h] = top[h] + std::log(sum[h]) + std::log(a_.least_weight);
    }
  }

  Softmax WholeOf(std::int64_t first, std::int64_t n, std::int64_t h) const {
    float top = kNothing;
    for (std::int64_t c = first; c < first + n; ++c) top = std::max(top, p_.top[c * group_ + h]);
    const float shift = top == kNothing ? 0 : top;
    double sum = 0;
    for (std::int64_t c = first; c < first + n; ++c) {
      const float weight = std::exp(p_.top[c * group_ + h] - shift);
      sum += static_cast<double>(weight) * p_.sum[c * group_ + h];
    }
    return {shift, sum};
  }

  // out = sum of e^(top_c - shift) (out_c + light_c mean_value) / sum.
  void JoinStates(const AttendHead& head, std::int64_t first, std::int64_t h,
                  const Softmax& whole) const {
    float* out = head.out + h * dim_;
    std::fill(out, out + dim_, 0.0f);
    double light = 0;
    for (std::int64_t c = first; c < first + Chunks(head); ++c) {
      const float weight = std::exp(p_.top[c * group_ + h] - whole.shift);
      const float* part = p_.out + (c * group_ + h) * dim_;
      for (std::int64_t d = 0; d < dim_; ++d) out[d] += weight * part[d];
      if (head.tokens != nullptr) light += static_cast<double>(weight) * p_.light[c * group_ + h];
    }
    const bool adds_light = light != 0 && head.mean_value != nullptr;
    for (std::int64_t d = 0; adds_light && d < dim_; ++d) {
      out[d] += static_cast<float>(light) * head.mean_value[d];
    }
    const auto inverse = static_cast<float>(whole.sum == 0 ? 0 : 1 / whole.sum);
    for (std::int64_t d = 0; d < dim_; ++d) out[d] *= inverse;
  }

  std::int64_t Values(const AttendHead& head, std::int64_t first) const {
    if (head.tokens == nullptr) return head.n_attended;
    std::int64_t n = 0;
    for (std::int64_t c = first; c < first + Chunks(head); ++c) n += p_.n_values[c];
    return n;
  }

  const KernelTable& k_;
  const AttendArgs& a_;
  const std::int64_t group_;
  const std::int64_t dim_;
  std::int64_t* first_chunk_ = nullptr;  // [n_kv_heads + 1]
  AttendParts p_ = {};
};

}  // namespace fathom::cpu
