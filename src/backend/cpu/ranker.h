// SPDX-License-Identifier: MIT
// Scan, winners and rest of all heads, by the threads of a team.
//
// Every thread owns the same range of blocks in all phases, so that the bytes U it writes are read
// again from its own cache; nothing but samples and the keys of candidates crosses to other cores.
//   1. per KV head: its tables, where the caller wants them made here
//   2. scan the own range: U of every token, base of every block, samples of the scores
//   3. per query head: a threshold that a little more than `keep` tokens should reach
//   4. own range: the keys of the tokens that reach it
//   5. per query head: the exact score of the last winner, from those keys
//   6. own range: one bit per token for the winners, and the rest of all others
//   7. own range: the union of the group, written behind what earlier ranges write
// The sample decides only how many keys there are: results do not depend on the ranges, that is on
// the number of threads. Keys are in the order of their tokens, so that 5 knows how many of the
// equal scores at the end of the ranking each range has too many: it drops them in 6.
//
// A phase takes a few microseconds, as much as a dozen lines that another core has just written:
// what threads write side by side lies in lines of their own.
#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <span>

#include "backend/cpu/kernels.h"
#include "backend/cpu/mean_scanner.h"
#include "backend/cpu/rank_ranges.h"
#include "backend/cpu/score_key.h"
#include "backend/cpu/scratch.h"
#include "backend/cpu/team.h"
#include "fathom/backend.h"
#include "store/layout.h"

namespace fathom::cpu {

// Scratch of one query head; who has written the parts is said at the phases.
struct alignas(kCacheLine) RankQuery {
  std::uint8_t* sums;      // [n_index]
  std::int32_t* base;      // [n_blocks]
  std::uint64_t* winners;  // [n_blocks] bit i for token i; before phase 6, candidates
  // Keys of candidates; every thread writes its own from where its tokens begin.
  std::int32_t* key;     // [n_index], room for kSelectSlack more behind each range
  std::int32_t* sample;  // [kSample], likewise
  float* threshold;      // NaN: none, all are candidates
  float* last;           // score of the last winner
  std::int32_t* excess;  // [team] tokens of that score too many in each range
};

// Hands out lines of a block of memory, or only counts them.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <typename T>
  T* Take(std::int64_t n) {
    T* p = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += LineBytes<T>(static_cast<std::size_t>(n));
    return p;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

class Ranker {
 public:
  using Member = Team::Member;

  // threads: of the team, at most.
  Ranker(const KernelTable& kernels, const RankArgs& a, int threads)
      : kernels_(kernels),
        a_(a),
        threads_(threads),
        ranges_(a.heads),
        n_blocks_(ranges_.n_blocks()),
        plan_bytes_(MeanScanner::PlanBytes(kernels, a.head_dim, a.group)) {
    assert(a.group > 0 && a.group <= kMaxGroup && a.head_dim <= kMaxHeadDim);
    assert(a.keep >= 1 && a.first >= 0 && a.first + a.keep <= a.last && a.last <= a.n_tokens);
  }

  // Before UseScratch: it forgets what it had.
  std::size_t ScratchBytes() {
    Carver carver(nullptr);
    Carve(&carver);
    return carver.used();
  }
  void UseScratch(std::byte* scratch) {
    Carver carver(scratch);
    Carve(&carver);
  }

  std::int64_t n_query_heads() const {
    return a_.group * static_cast<std::int64_t>(a_.heads.size());
  }

  // All phases, for one member of the team.
  void Run(const Member& m) {
    if (a_.planner != nullptr) {
      Plan(m);
      m.Wait();
      if (failure_) return;
    }
    ScanRange(m);
    m.Wait();
    m.ForMine(n_query_heads(), [&](std::int64_t i) { FindThreshold(i); });
    m.Wait();
    CollectRange(m);
    m.Wait();
    m.ForMine(n_query_heads(), [&](std::int64_t i) { FindLast(i, m.size()); });
    m.Wait();
    MarkRange(m);
    m.Wait();
    WriteUnion(m);
    m.ForMine(static_cast<std::int64_t>(a_.heads.size()),
              [&](std::int64_t kv) { WriteAlways(kv, m.size()); });
  }

  // What the planner has thrown, or null.
  const std::exception_ptr& failure() const { return failure_; }

 private:
  using Piece = RankRanges::Piece;

  static constexpr std::int64_t kSample = 1024;
  static constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

  static std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

  void Plan(const Member& m) {
    m.ForMine(static_cast<std::int64_t>(a_.heads.size()), [&](std::int64_t kv) {
      try {
        a_.planner->PlanHead(kv);
      } catch (...) {
#pragma omp critical(fathom_rank_failure)
        failure_ = std::current_exception();
      }
    });
  }

  void ScanRange(const Member& m) {
    MeanScanner scanner(kernels_,
                        {a_.group, a_.segment_blocks, a_.mean_bits,
                         static_cast<std::int64_t>(layout::SideBytes(
                             Codec::kMean, a_.head_dim, a_.mean_bits, a_.segment_blocks))},
                        plans_ + Size(m.thread()) * plan_bytes_);
    ranges_.ForRange(m.thread(), m.size(), [&](std::int64_t kv, const Piece& p) {
      const RankHead& head = a_.heads[Size(kv)];
      const RankQuery& first = heads_[kv * a_.group];
      scanner.Run(
          head.tables[Size(p.segment->table)], *p.segment, p.next, p.first, p.count,
          {first.sums + p.block * kBlockTokens, sums_stride_, first.base + p.block, base_stride_});
      if (rank_ > 0) Sample(kv, head.tables[Size(p.segment->table)], p);
    });
  }

  void FindThreshold(std::int64_t i) {
    const RankQuery& head = heads_[i];
    *head.threshold = kNaN;
    if (rank_ == 0) return;
    const float threshold = ScoreOfKey(kernels_.kth_key(head.sample, kSample, rank_));
    if (std::isfinite(threshold)) *head.threshold = threshold;
  }

  void CollectRange(const Member& m) {
    std::fill_n(Counts(m.thread()), n_query_heads(), 0);
    ranges_.ForRange(m.thread(), m.size(), [&](std::int64_t kv, const Piece& p) {
      const ScanTable& table = a_.heads[Size(kv)].tables[Size(p.segment->table)];
      for (std::int32_t h = 0; h < a_.group; ++h) {
        const float threshold = *heads_[kv * a_.group + h].threshold;
        const float scale = table.scale[Size(h)];
        MarkBlocks(kv, h, table, p,
                   std::isnan(threshold) ? -kMostTotal : LeastTotal(threshold, scale),
                   /*cut=*/nullptr);
        ListKeys(kv, h, table, p, m);
      }
    });
  }

  void FindLast(std::int64_t i, int team) {
    const RankQuery& head = heads_[i];
    std::int64_t n = JoinKeys(i, team);
    const bool all = n < a_.keep;  // the sample was unlucky
    if (all) n = ListAllKeys(i);
    const std::int32_t last = kernels_.kth_key(head.key, n, a_.keep);
    const std::int64_t reach =
        std::count_if(head.key, head.key + n, [last](std::int32_t key) { return key >= last; });
    *head.last = ScoreOfKey(last);
    SplitExcess(i, team, {head.key, Size(n)}, last, reach - a_.keep, all);
    if (a_.exp_scale != 0) a_.heads[Size(i / a_.group)].cut[i % a_.group] = *head.last;
  }

  void MarkRange(const Member& m) {
    ranges_.ForRange(m.thread(), m.size(), [&](std::int64_t kv, const Piece& p) {
      const ScanTable& table = a_.heads[Size(kv)].tables[Size(p.segment->table)];
      for (std::int32_t h = 0; h < a_.group; ++h) {
        const float* last = heads_[kv * a_.group + h].last;
        const std::int32_t least =
            std::isnan(*last) ? -kMostTotal : LeastTotal(*last, table.scale[Size(h)]);
        MarkBlocks(kv, h, table, p, least, a_.exp_scale == 0 ? nullptr : last);
      }
    });
    for (std::int64_t i = 0; i < n_query_heads(); ++i) {
      if (heads_[i].excess[m.thread()] > 0) DropTies(i, m);
    }
    // Winners of the union.
    std::int64_t* count = UnionCounts(m.thread());
    std::fill_n(count, a_.heads.size(), 0);
    ranges_.ForRange(m.thread(), m.size(), [&](std::int64_t kv, const Piece& p) {
      count[kv] += Unite(kv, p, nullptr, nullptr);
    });
  }

  void WriteUnion(const Member& m) {
    std::int64_t at = 0;
    std::int64_t current = -1;
    ranges_.ForRange(m.thread(), m.size(), [&](std::int64_t kv, const Piece& p) {
      if (kv != current) {
        current = kv;
        at = a_.first;
        for (int t = 0; t < m.thread(); ++t) at += UnionCounts(t)[kv];
      }
      const RankHead& out = a_.heads[Size(kv)];
      at += Unite(kv, p, out.tokens + at, out.mask + at);
    });
  }

  // The tokens that are always attended, around the winners.
  void WriteAlways(std::int64_t kv, int team) {
    const RankHead& out = a_.heads[Size(kv)];
    const auto everyone = static_cast<std::uint16_t>((1u << a_.group) - 1);
    std::int64_t at = 0;
    const auto add = [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t i = from; i < to; ++i) {
        out.tokens[at] = static_cast<std::int32_t>(i);
        out.mask[at++] = everyone;
      }
    };
    add(0, a_.first);
    for (int t = 0; t < team; ++t) at += UnionCounts(t)[kv];
    add(a_.last, a_.n_tokens);
    *out.n_attended = at;
  }

  void Carve(Carver* carver) {
    const std::int64_t n = n_query_heads();
    const std::int64_t n_index = n_blocks_ * kBlockTokens;
    sums_stride_ = n_index;
    base_stride_ = StrideOf<std::int32_t>(n_blocks_);
    heads_ = carver->Take<RankQuery>(n);
    plans_ = carver->Take<std::byte>(static_cast<std::int64_t>(plan_bytes_) * threads_);
    counts_stride_ = StrideOf<std::int32_t>(n);
    counts_ = carver->Take<std::int32_t>(counts_stride_ * threads_);
    union_stride_ = StrideOf<std::int64_t>(static_cast<std::int64_t>(a_.heads.size()));
    union_ = carver->Take<std::int64_t>(union_stride_ * threads_);
    auto* sums = carver->Take<std::uint8_t>(n * sums_stride_);
    auto* base = carver->Take<std::int32_t>(n * base_stride_);
    winners_ = carver->Take<std::uint64_t>(n * n_blocks_);
    for (std::int64_t i = 0; i < n; ++i) {
      RankQuery head = {};
      head.key = carver->Take<std::int32_t>(n_index + (threads_ + 1) * kSelectSlack);
      head.sample = carver->Take<std::int32_t>(kSample + kSelectSlack);
      head.threshold = carver->Take<float>(1);
      head.last = carver->Take<float>(1);
      head.excess = carver->Take<std::int32_t>(threads_);
      if (heads_ == nullptr) continue;
      head.sums = sums + i * sums_stride_;
      head.base = base + i * base_stride_;
      head.winners = winners_ + i * n_blocks_;
      heads_[i] = head;
    }
    rank_ = SampleRank();
  }

  // Elements of n, rounded up to whole cache lines.
  template <typename T>
  static std::int64_t StrideOf(std::int64_t n) {
    return static_cast<std::int64_t>(LineBytes<T>(Size(n)) / sizeof(T));
  }

  // Of the sample, how many should be candidates, so that `keep` tokens nearly always are; 0 when a
  // sample would not leave most tokens out.
  std::int64_t SampleRank() const {
    const std::int64_t n = a_.last - a_.first;
    if (n < kSample) return 0;
    const double expected = static_cast<double>(a_.keep * kSample) / static_cast<double>(n);
    const auto rank = static_cast<std::int64_t>(expected + 3 * std::sqrt(expected)) + 4;
    return rank <= kSample * 3 / 4 ? rank : 0;
  }

  float ScoreAt(const RankQuery& head, const ScanTable& table, std::int32_t h,
                std::int64_t token) const {
    const std::int32_t total =
        (head.sums[token] << table.shift[Size(h)]) + head.base[token / kBlockTokens];
    return static_cast<float>(total) * table.scale[Size(h)];
  }

  // One token from each of kSample equal ranges, at a scattered place so that no period of the
  // scores can hide from it.
  void Sample(std::int64_t kv, const ScanTable& table, const Piece& p) const {
    const std::int64_t range = (a_.last - a_.first) / kSample;
    const std::int64_t begin = p.block * kBlockTokens;
    const std::int64_t end = begin + std::int64_t{p.count} * kBlockTokens;
    std::int32_t tokens[kSample];
    std::int64_t first = -1, n = 0;
    std::int64_t i = std::max<std::int64_t>((begin - a_.first) / range - 1, 0);
    for (; i < kSample; ++i) {
      const std::uint32_t scatter = (static_cast<std::uint32_t>(i) * 2654435769u) >> 16;
      const std::int64_t token = a_.first + i * range + (scatter * range >> 16);
      if (token < begin) continue;
      if (token >= end) break;
      if (n == 0) first = i;
      tokens[n++] = static_cast<std::int32_t>(token);
    }
    for (std::int32_t h = 0; h < a_.group && n > 0; ++h) {
      const RankQuery& head = heads_[kv * a_.group + h];
      std::int32_t keys[kSample + kSelectSlack];
      Keys(head, table, h, 0, nullptr, tokens, n, keys);
      std::copy_n(keys, n, head.sample + first);
    }
  }

  // Keys of marked blocks from block `block` on, or of n tokens counted from there.
  std::int64_t Keys(const RankQuery& head, const ScanTable& table, std::int32_t h,
                    std::int64_t block, const std::uint64_t* marks, const std::int32_t* tokens,
                    std::int64_t n, std::int32_t* keys) const {
    const RankKeysArgs args = {head.sums + block * kBlockTokens,
                               head.base + block,
                               table.shift[Size(h)],
                               table.scale[Size(h)],
                               marks,
                               tokens,
                               n,
                               keys};
    return kernels_.rank_keys(&args);
  }

  // Bits of the tokens of a piece with T >= least; with a cut, the rest of the others too.
  void MarkBlocks(std::int64_t kv, std::int32_t h, const ScanTable& table, const Piece& p,
                  std::int32_t least, const float* cut) const {
    const RankQuery& head = heads_[kv * a_.group + h];
    const float scale = table.scale[Size(h)];
    const std::int64_t begin = p.block * kBlockTokens;
    const RankHead& out = a_.heads[Size(kv)];
    float* rest = cut == nullptr ? nullptr : out.rest + h * out.rest_stride + p.block;
    const bool weigh = cut != nullptr && std::isfinite(*cut) && scale > 0;
    if (rest != nullptr && !weigh) std::fill_n(rest, p.count, kNaN);
    const RankBlocksArgs args = {head.sums + begin,
                                 head.base + p.block,
                                 p.count,
                                 a_.first - begin,
                                 a_.last - begin,
                                 table.shift[Size(h)],
                                 least,
                                 head.winners + p.block,
                                 weigh ? a_.exp_scale * scale : 0.0f,
                                 weigh ? *cut / scale : 0.0f,
                                 rest};
    kernels_.rank_blocks(&args);
  }

  // The keys of a piece's candidates, behind those the thread has. Slack behind the last key may
  // reach into the keys of the next thread: hence kSelectSlack between ranges.
  void ListKeys(std::int64_t kv, std::int32_t h, const ScanTable& table, const Piece& p,
                const Member& m) const {
    const RankQuery& head = heads_[kv * a_.group + h];
    std::int32_t& count = Counts(m.thread())[kv * a_.group + h];
    std::int32_t* key = head.key + KeyBegin(m.thread(), m.size(), kv) + count;
    count += static_cast<std::int32_t>(
        Keys(head, table, h, p.block, head.winners + p.block, nullptr, p.count, key));
  }

  std::int64_t KeyBegin(int thread, int team, std::int64_t kv) const {
    return ranges_.Begin(thread, team, kv) + thread * std::int64_t{kSelectSlack};
  }

  // Moves the keys of all threads together; returns how many there are.
  std::int64_t JoinKeys(std::int64_t i, int team) const {
    std::int32_t* key = heads_[i].key;
    std::int64_t n = 0;
    for (int thread = 0; thread < team; ++thread) {
      const std::int64_t from = KeyBegin(thread, team, i / a_.group);
      const std::int32_t count = Counts(thread)[i];
      if (from != n && count > 0) std::memmove(key + n, key + from, Size(count) * sizeof(*key));
      n += count;
    }
    return n;
  }

  // Of the tokens with the last winner's score, the latest ones are no winners: those that a range
  // has too many.
  void DropTies(std::int64_t i, const Member& m) const {
    const RankQuery& head = heads_[i];
    std::int32_t excess = head.excess[m.thread()];
    const RankHead& out = a_.heads[Size(i / a_.group)];
    const auto h = static_cast<std::int32_t>(i % a_.group);
    const std::int32_t last = KeyOfScore(*head.last);
    const std::int64_t kv = i / a_.group;
    const std::int64_t from = ranges_.Begin(m.thread(), m.size(), kv) / kBlockTokens;
    const std::int64_t to = ranges_.Begin(m.thread() + 1, m.size(), kv) / kBlockTokens;
    std::int64_t end = n_blocks_;
    for (auto s = out.segments.rbegin(); s != out.segments.rend() && excess > 0; ++s) {
      const ScanTable& table = out.tables[Size(s->table)];
      const std::int64_t begin = end - s->n_blocks;
      for (std::int64_t b = std::min(end, to) - 1; b >= std::max(begin, from) && excess > 0; --b) {
        for (std::uint64_t bits = head.winners[b]; bits != 0 && excess > 0;) {
          const int token = 63 - std::countl_zero(bits);
          bits ^= std::uint64_t{1} << token;
          if (KeyOfScore(ScoreAt(head, table, h, b * kBlockTokens + token)) != last) continue;
          head.winners[b] ^= std::uint64_t{1} << token;
          if (a_.exp_scale != 0) out.rest[h * out.rest_stride + b] += 1.0f;
          --excess;
        }
      }
      end = begin;
    }
  }

  // How many of the keys that equal the last winner's each range has too many: the latest ones are.
  // keys: joined, or, with `all`, of all tokens that may be candidates.
  void SplitExcess(std::int64_t i, int team, std::span<const std::int32_t> keys, std::int32_t last,
                   std::int64_t excess, bool all) const {
    std::int32_t* of_range = heads_[i].excess;
    auto end = static_cast<std::int64_t>(keys.size());
    for (int thread = team - 1; thread >= 0; --thread) {
      const std::int64_t token = ranges_.Begin(thread, team, i / a_.group);
      const std::int64_t begin =
          all ? std::clamp(token, a_.first, a_.last) - a_.first : end - Counts(thread)[i];
      const std::int64_t equal =
          excess == 0 ? 0 : std::count(keys.begin() + begin, keys.begin() + end, last);
      of_range[thread] = static_cast<std::int32_t>(std::min(equal, excess));
      excess -= of_range[thread];
      end = begin;
    }
  }

  std::int64_t ListAllKeys(std::int64_t i) const {
    const RankQuery& head = heads_[i];
    const RankHead& kv = a_.heads[Size(i / a_.group)];
    const auto h = static_cast<std::int32_t>(i % a_.group);
    std::int64_t token = 0, n = 0;
    for (const SegmentView& s : kv.segments) {
      const ScanTable& table = kv.tables[Size(s.table)];
      for (const std::int64_t end = token + s.n_blocks * std::int64_t{kBlockTokens}; token < end;
           ++token) {
        if (token < a_.first || token >= a_.last) continue;
        head.key[n++] = KeyOfScore(ScoreAt(head, table, h, token));
      }
    }
    return n;
  }

  // The union of the group in a piece; returns how many tokens.
  std::int64_t Unite(std::int64_t kv, const Piece& p, std::int32_t* tokens,
                     std::uint16_t* mask) const {
    const RankUnionArgs args = {
        winners_ + kv * a_.group * n_blocks_, n_blocks_, a_.group, p.block, p.count, tokens, mask};
    return kernels_.rank_union(&args);
  }

  std::int32_t* Counts(int thread) const { return counts_ + thread * counts_stride_; }
  std::int64_t* UnionCounts(int thread) const { return union_ + thread * union_stride_; }

  const KernelTable& kernels_;
  const RankArgs& a_;
  const int threads_;
  const RankRanges ranges_;
  const std::int64_t n_blocks_;
  const std::size_t plan_bytes_;
  std::exception_ptr failure_;
  std::int64_t rank_ = 0;             // of the threshold in the sample
  RankQuery* heads_ = nullptr;        // [n_query_heads]
  std::byte* plans_ = nullptr;        // [threads][plan_bytes]
  std::uint64_t* winners_ = nullptr;  // [n_query_heads][n_blocks]
  // Of every thread, in lines of its own: candidates of each query head in its range, and winners
  // of the union of each KV head.
  std::int32_t* counts_ = nullptr;  // [threads][counts_stride]
  std::int64_t* union_ = nullptr;   // [threads][union_stride]
  std::int64_t counts_stride_ = 0;
  std::int64_t union_stride_ = 0;
  std::int64_t sums_stride_ = 0;
  std::int64_t base_stride_ = 0;
};

}  // namespace fathom::cpu
