// SPDX-License-Identifier: MIT
// Backend: the arithmetic of one decode step, on plain parameter structs.
//
// Memory convention of the whole header: arrays are row-major and contiguous, written
// [outer][inner]; every pointer has its shape beside it. Pointers are borrowed for the duration of
// the call. A call covers ONE LAYER and ALL its KV heads: the span of per-head structs is the unit
// of parallelism, together with ranges of tokens inside a head.
//
// Two rules hold on every backend, and tests/backend_conformance_test.cc checks them against `ref`:
//  - planes, means, scales and integer scores are equal bit for bit; floating results within a
//  stated relative L2;
//  - among equal scores the smaller token index wins, and NaN scores lose against every number.
//
// Thread safety: a Backend is immutable after creation; calls from several threads are safe when
// their outputs are distinct. Calls use up to n_threads() OpenMP threads. Errors: arguments are the
// library's own, so violations are assertions; nothing here throws after creation except
// std::bad_alloc for scratch space.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/types.h"

namespace fathom {

// --- pack: 64 keys of one KV head into planes
// ------------------------------------------------------------------------- Mean codec, all in IEEE
// single precision without fused multiply-add:
//   sum_j = x_0j + x_1j + ... (in token order), code m_j = clip(rint(sum_j / 64 / mean_step_j),
//   -lim, lim), lim = 2^(mean_bits-1) - 1, y = x - float(m_j) * mean_step_j, c = clip(floor(y /
//   (range_j / 8)), -8, 7) + 8.
// Paper codec: a_j = fp16(max |x_ij|) rounded to nearest even, c = clip(floor(x / (a_j / 8)), -8,
// 7) + 8, c = 8 when a_j is 0 (design section 3).
struct PackArgs {
  Codec codec = Codec::kMean;
  std::int32_t head_dim = 0;         // D
  std::int32_t segment_blocks = 0;   // capacity of the segment, in blocks
  std::int32_t mean_bits = 4;        // 4 or 8 (mean codec)
  std::int32_t block = 0;            // position of the block in the segment
  const float* x = nullptr;          // [64][D] keys, already centred and in the index's basis
  const float* mean_step = nullptr;  // [D] > 0 (mean codec)
  const float* range = nullptr;      // [D] > 0 (mean codec): a_j, so that a cell is a_j / 8 wide
  std::uint64_t* planes = nullptr;   // [D][4] rows of words; word `block` of each is written
  std::uint8_t* side = nullptr;      // means or scales of the segment, layout in docs/format.md
  std::int32_t row_blocks = 0;       // words from one row to the next, even; 0: segment_blocks
};

// --- scan: approximate scores of all indexed tokens
// ------------------------------------------------------------------- One segment of one KV head as
// the scan sees it.
struct SegmentView {
  const std::uint64_t* planes = nullptr;  // [D][4] rows of segment_blocks words, row_blocks apart
  const std::uint8_t* side = nullptr;     // means (mean codec) or fp16 scales (paper codec)
  std::int32_t n_blocks = 0;              // blocks in use
  std::int32_t table = 0;                 // which ScanTable of the head applies (mean codec)
  // Words from one row of planes to the next, a multiple of 2; 0: segment_blocks. Segments that lie
  // between each other's rows make the memory that a plane takes of them one run, which spares a
  // scan most of its address translations.
  std::int32_t row_blocks = 0;
};

// Words from one row of planes to the next, of PackArgs or SegmentView.
template <typename Segment>
constexpr std::int32_t RowBlocks(const Segment& s, std::int32_t segment_blocks) {
  return s.row_blocks != 0 ? s.row_blocks : segment_blocks;
}

// What a query reads from segments that share one set of steps and decoders (mean codec): integers
// only, so that every backend finds the same bits. Built once per scan by BuildScanTable
// (fathom/scan_table.h). The planes are dealt to 1, 2, 4 or 8 parts. For query head h and token i:
//   u_r  = low[r][h] + sum over planes p of part r of weight[p][h] * bit_p(i)      in 0 .. 255
//   U    = the average of all u_r, taken in pairs, each (x + y + 1) >> 1:
//          avg(u_0, u_1), or avg(avg(u_0, u_1), avg(u_2, u_3)), ..                 in 0 .. 255
//   base = constant[h] + sum over a of mean_weight[a][h] * mean_code[a](block)
//   T    = U * 2^shift[h] + base                                                   |T| < 2^24
//   score_h(i) = float(T) * scale[h]
// So all that depends on the token is one byte, U; the rest belongs to its block. Both T and base
// are exact in single precision.
struct ScanTable {
  std::int32_t n_parts = 1;
  std::vector<std::int32_t> plane;  // [n_planes] channel * 4 + p; part by part, ascending in each
  std::vector<std::int32_t> part_end;     // [n_parts] index into plane behind the part's last
  std::vector<std::int16_t> weight;       // [n_planes][group] of magnitude 0 .. 255
  std::vector<std::int32_t> low;          // [n_parts][group] minus the sum of the negative weights
  std::vector<std::int32_t> channel;      // [n_active] channels whose mean is read, ascending
  std::vector<std::int32_t> mean_weight;  // [n_active][group]
  std::vector<std::int32_t> constant;     // [group]
  std::vector<std::int32_t> shift;        // [group] 0 .. 15
  std::vector<float> scale;               // [group]; NaN for a query that is not finite
};

struct ScanHead {
  std::span<const SegmentView> segments;
  std::span<const ScanTable> tables;    // mean codec
  const float* q = nullptr;             // [group][D] queries in the index's basis (paper codec)
  const std::uint8_t* depth = nullptr;  // [D] planes read of each channel, 0..4 (paper codec)
  float* scores = nullptr;  // [group][stride] out, written for every token of the segments in order
  std::int64_t stride = 0;
  // Out where scores is null (mean codec): the integers that they are made of, a fifth of the bytes
  // and exact. For those who select by themselves. Null as well: they are made and dropped, block
  // by block, which shows what the scan takes without writing its results.
  std::uint8_t* sums = nullptr;  // [group][stride]: U of every token
  std::int32_t* base = nullptr;  // [group][base_stride]: of every block
  std::int64_t base_stride = 0;
};

// Paper codec: score_h(i) = sum_j q_hj a_j(block) * sum_{p < t_j} sigma_p 2^-(p+1), channels in
// ascending order.
struct ScanArgs {
  Codec codec = Codec::kMean;
  std::int32_t head_dim = 0;
  std::int32_t group = 0;
  std::int32_t segment_blocks = 0;
  std::int32_t mean_bits = 4;
  std::span<const ScanHead> heads;
};

// --- exact scores
// -----------------------------------------------------------------------------------------------------
// Keys of one KV head: key i is the D numbers at rows + i * key_stride. What lies between two keys
// (values, another table) is not read.
struct ScoreHead {
  const Half* rows = nullptr;  // [n_tokens][key_stride], of which the first D are read
  const float* q = nullptr;    // [group][D]
  float* scores = nullptr;     // [group][stride] out: q_h . k_i, unscaled
  std::int64_t stride = 0;
};

struct ScoreArgs {
  std::int32_t head_dim = 0;
  std::int32_t group = 0;
  std::int64_t n_tokens = 0;
  std::span<const ScoreHead> heads;
  // Halfs from one key to the next, >= D; 0 means 2D, the rows of the row store. Any other table of
  // fp16 vectors can be scored too: D for block means, 2D for one side of (minimum, maximum) pages.
  std::int64_t key_stride = 0;
};

// --- label scan: approximate scores from packed codes of a few channels
// -----------------------------------------------------------------------------------------------
// A label is what a table keeps of a key: codes of t = 1 .. 4 bits in C channels, and one fp16
// scale a_j >= 0 per block and channel. Code c means (c + 1/2 - 2^(t-1)) * a_j / 2^(t-1): the first
// t planes of the paper codec. Codes take 2 bits each for t <= 2, else 4; layouts in
// docs/format.md.

// One segment of one KV head's table. What lies beyond n_blocks, or in the channels that fill the
// last unit up, may hold anything.
struct LabelView {
  const std::uint8_t* codes = nullptr;
  const Half* scales = nullptr;  // [channel][segment_blocks]
  std::int32_t n_blocks = 0;     // in use
};

struct LabelScanHead {
  std::span<const LabelView> segments;
  // Channels read, C of them, 0 <= C <= kMaxHeadDim. kTokens: the channels of the table, in its
  // order.
  std::int32_t n_channels = 0;
  const std::int32_t* channels = nullptr;  // kChannels: [C] which of the table's, without repeats
  const float* q = nullptr;                // [group][C]
  float* scores = nullptr;  // [group][stride] out, written for every token of the segments in order
  std::int64_t stride = 0;
};

// Every query's products with a block's scales are rounded to 8 bits, so that the sums over
// channels are integers. Per block and query head h, in IEEE single precision without fused
// multiply-add:
//   p_j = q_hj * a_j,   m = max_j |p_j|,   w_j = rint(p_j * (127 / m)), or 0 where m < 2^-100
//   T(i) = sum_j w_j c_j(i) - (2^t - 1) / 2 * sum_j w_j,   score_h(i) = T(i) * (m / 127 * 2^(1-t))
// T is a multiple of 1/2 below 2^19, hence exact, and the last product rounds once: scores are
// equal bit for bit on every backend. A p_j that is NaN or infinite makes the block's scores NaN.
// The rounding is an error of at most m / 254 in each p_j.
struct LabelScanArgs {
  LabelLayout layout = LabelLayout::kTokens;
  std::int32_t planes = 4;  // t
  std::int32_t group = 0;
  std::int32_t segment_blocks = 0;  // capacity of a segment, a multiple of 16
  std::span<const LabelScanHead> heads;
};

// --- mass: sums of exp of scores, block by block
// ----------------------------------------------------------------------------------------------
// What the tokens of a block would weigh in a softmax, up to a factor the caller chooses by shift:
//   mass_h(b) = sum over the 64 tokens i of block b of exp(min(scale * score_h(i) - shift_h, 88))
// A score of -inf counts 0. The argument may be positive; above 88 it is taken as 88, so that every
// term is finite (1.7e38) and a sum beyond the largest float is +inf. Terms below the smallest
// normal float (1.2e-38, arguments below -87.3) may count 0. A NaN score or shift makes the mass of
// its block NaN. Within these limits the relative error is at most 1e-5, nearly all of it from
// rounding the argument to a float. A block's mass does not depend on the other blocks of the call.
struct MassHead {
  // [group][stride]; -inf for tokens that must not count. Scores of listed tokens become -inf.
  float* scores = nullptr;
  std::int64_t stride = 0;       // >= n_blocks * 64
  const float* shift = nullptr;  // [group], finite
  float* mass = nullptr;         // [group][n_blocks] out
  // Tokens that must not count, as Select lists them: ascending, bit h of mask for query head h.
  // Those at or beyond n_blocks * 64 are ignored. Null with n_listed = 0.
  const std::int32_t* tokens = nullptr;
  const std::uint16_t* mask = nullptr;
  std::int64_t n_listed = 0;
};

struct MassArgs {
  std::int32_t group = 0;
  std::int64_t n_blocks = 0;
  float scale = 0;  // > 0 and finite: 1/sqrt(D) for scores that are plain dot products
  std::span<const MassHead> heads;
};

// --- select: exact top-k per query head, union over the group
// ---------------------------------------------------------
struct SelectHead {
  const float* scores = nullptr;  // [group][stride]
  std::int64_t stride = 0;
  std::int32_t* winners = nullptr;  // [group][keep] out: ascending token indices per query head
  // Out: what the group attends: always-kept tokens and winners, ascending, without repeats. Bit h
  // of mask says that query head h attends the token. Capacity: always-kept + min(group * keep,
  // candidates).
  std::int32_t* tokens = nullptr;
  std::uint16_t* mask = nullptr;
  std::int64_t* n_attended = nullptr;
};

// Candidates are tokens [first, last); tokens [0, first) and [last, n_tokens) are always attended
// by every head. Requires 0 <= keep <= last - first.
struct SelectArgs {
  std::int32_t group = 0;
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t n_tokens = 0;
  std::int64_t keep = 0;
  std::span<const SelectHead> heads;
};

// --- rank: scan, select and mass in one pass
// ---------------------------------------------------------
// What Scan, Select and Mass would give together for the mean codec, without an array of scores:
// exactly the winners that Select finds in the scores of Scan, and the mass of what a head did not
// select,
//   rest_h(b) = sum over tokens i of block b that are candidates and no winners of head h of
//               exp(exp_scale * (score_h(i) - cut_h)).
// cut_h is a score that the backend chooses near that of the least winner; only rest and cut
// together mean something. Scores are summed from tables: rest_h(b) is right within 2 % of itself
// plus 0.1, where a token with score cut_h counts 1. Where scores of a head are not finite, its
// rest is NaN.
struct RankHead {
  std::span<const SegmentView> segments;  // n_index tokens together, the same for all heads
  std::span<const ScanTable> tables;      // with a planner, their contents come later
  // Out, as in SelectHead.
  std::int32_t* tokens = nullptr;
  std::uint16_t* mask = nullptr;
  std::int64_t* n_attended = nullptr;
  // Out, where exp_scale is not 0.
  float* rest = nullptr;  // [group][rest_stride], of which n_index / 64 are written
  std::int64_t rest_stride = 0;
  float* cut = nullptr;  // [group]
};

// Makes the tables of KV heads when a backend wants them, so that a call need not be preceded by a
// parallel region of its own.
class RankPlanner {
 public:
  // Fills RankHead::tables of one KV head. Called once for each, from any thread, for different
  // heads at the same time. What it throws, Rank throws, and leaves its outputs unspecified.
  virtual void PlanHead(std::int64_t kv_head) = 0;

 protected:
  ~RankPlanner() = default;
};

// Candidates are tokens [first, last) as in SelectArgs, with 0 <= first, first + keep <= last and
// keep >= 1; last <= n_tokens, and last <= n_index, the tokens of the segments. Segments may hold
// tokens beyond n_tokens, which are left out.
struct RankArgs {
  std::int32_t head_dim = 0;
  std::int32_t group = 0;
  std::int32_t segment_blocks = 0;
  std::int32_t mean_bits = 4;
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t n_tokens = 0;
  std::int64_t keep = 0;
  float exp_scale = 0;  // >= 0: 1/sqrt(D) for scores that are plain dot products; 0: no rest
  std::span<const RankHead> heads;
  RankPlanner* planner = nullptr;  // null: the tables are made

  // For backends that want all tables first.
  void PlanHeads() const {
    if (planner == nullptr) return;
    for (std::size_t h = 0; h < heads.size(); ++h) {
      planner->PlanHead(static_cast<std::int64_t>(h));
    }
  }
};

// --- attend: softmax attention of one query position over chosen rows
// -------------------------------------------------
// With least_weight > 0 the values of listed rows are read lazily: not where all heads that attend
// a row are known to give it less weight. With s_h(i) = scale * q_h . k_i, and base_h the log of
// the sum of exp(s_h) over those rows that h attends among the first kSinks and the last kWindow
// listed ones
// (-inf without any), a row is light for h when s_h(i) < base_h + log(least_weight), else heavy,
// and
//   out_h = (sum over heavy i of e^s_h(i) v_i + sum over light i of e^s_h(i) * mean_value) /
//           (sum over all i of e^s_h(i)).
// base_h is a lower bound of lse_h, so every row with a softmax weight of at least least_weight is
// heavy. The value of a row that is heavy for no head is not read and may hold anything. lse is
// that of all attended rows either way. s and base are of single precision: which side a row within
// 1e-5 of the limit falls on is the backend's choice, but not one of the number of threads.
struct AttendHead {
  const Half* rows = nullptr;  // [n_tokens][2][D], read in place
  const float* q = nullptr;    // [group][D]
  const std::int32_t* tokens =
      nullptr;  // [n_attended] ascending; null: tokens 0 .. n_attended - 1, all heads
  const std::uint16_t* mask =
      nullptr;  // [n_attended] query heads that attend the token; null with null tokens
  std::int64_t n_attended = 0;
  float* out = nullptr;  // [group][D]; zeros where a head attends nothing
  float* lse = nullptr;  // [group] log of the sum of exp, -inf where a head attends nothing
  const float* mean_value = nullptr;  // [D] finite, for light rows; null: zeros
  std::int64_t* n_values = nullptr;   // out, unless null: rows of which the value was read
};

struct AttendArgs {
  std::int32_t head_dim = 0;
  std::int32_t group = 0;
  float scale = 0;  // 1/sqrt(D)
  std::span<const AttendHead> heads;
  float least_weight = 0;  // 0: all values are read; heads with null tokens always read all
};

// --- weigh: values by mass, block by block
// ----------------------------------------------------------------------------------------------
// What tokens that were not attended add to attention, by the mean values of their blocks:
//   out_h = sum over read blocks b of mass_h(b) means(b) + (sum over the other blocks of mass_h(b))
//   * mean.
// A block is read, for all heads alike, when mass_h(b) > least_h for at least one of them.
struct WeighHead {
  const Half* means = nullptr;     // [n_blocks][D]; null: no block is read
  const float* mean = nullptr;     // [D]
  const float* mass = nullptr;     // [group][n_blocks]
  const float* least = nullptr;    // [group]; may be null with null means
  float* out = nullptr;            // [group][D]
  std::int64_t* n_read = nullptr;  // out, unless null: blocks that were read
};

struct WeighArgs {
  std::int32_t head_dim = 0;
  std::int32_t group = 0;
  std::int64_t n_blocks = 0;
  std::span<const WeighHead> heads;
};

// --- rank and attend: one query position of a layer, from its ranking to its output
// ---------------------------------------------------------
// Rank, Attend over the tokens that it lists, and, where rank.exp_scale is not 0, what the residual
// adds. With s = rank.exp_scale and n_blocks = floor(rank.n_tokens / 64), for every query head
//   m(b) = rest(b) exp(min(s (cut + offset) + s^2 noise / 2 - lse, 88)),  M = sum of m over blocks,
//   r = out of Weigh with the masses m and least = least_share (1 + M),
//   out = (out + factor r) / (1 + factor M).
// out is left as Attend gives it where the factor is 0, M or r is not finite, or 1 / (1 + factor M)
// is 0. rest of rank.heads is spoiled. Requires a segment block for each of the n_blocks, the same
// rest_stride in all heads, and as many heads everywhere.
struct RestHead {
  const float* offset = nullptr;  // [group] what the scores lack: score + offset estimates q.k
  const float* noise = nullptr;   // [group] variance of that estimate's error
  const float* factor = nullptr;  // [group] >= 0
  const Half* means = nullptr;    // as in WeighHead
  const float* mean = nullptr;
  float* rest = nullptr;           // [group][D] out: r
  float* mass = nullptr;           // [group] out: M
  std::int64_t* n_read = nullptr;  // as in WeighHead
};

struct RankAttendArgs {
  RankArgs rank;
  // tokens and mask: where those of rank.heads are written. n_attended is set by the call.
  std::span<AttendHead> attend;
  float scale = 0;  // least_weight: as in AttendArgs
  float least_weight = 0;
  float least_share = 0;
  std::span<const RestHead> rest;  // not read where exp_scale is 0

  std::int64_t n_blocks() const { return rank.n_tokens / kBlockTokens; }
};

// --- prefill: dense causal attention of a chunk
// ----------------------------------------------------------------------- Query t of the chunk sees
// tokens 0 .. first + t. The rows of the chunk itself are already in the row store.
struct PrefillArgs {
  HeadGeometry geometry;
  float scale = 0;
  std::int64_t first = 0;  // position of the chunk's first query
  std::int64_t n_queries = 0;
  const float* q = nullptr;           // [n_queries][n_heads][D]
  float* out = nullptr;               // [n_queries][n_heads][D]
  std::span<const Half* const> rows;  // [n_kv_heads], each [first + n_queries][2][D]
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  virtual int n_threads() const = 0;

  virtual void Pack(const PackArgs& args) const = 0;
  virtual void Scan(const ScanArgs& args) const = 0;
  virtual void Score(const ScoreArgs& args) const = 0;
  virtual void ScanLabels(const LabelScanArgs& args) const = 0;
  virtual void Mass(const MassArgs& args) const = 0;
  virtual void Select(const SelectArgs& args) const = 0;
  virtual void Rank(const RankArgs& args) const = 0;
  virtual void Attend(const AttendArgs& args) const = 0;
  virtual void Weigh(const WeighArgs& args) const = 0;
  virtual void RankAttend(const RankAttendArgs& args) const = 0;
  virtual void Prefill(const PrefillArgs& args) const = 0;
};

// Joins two partial attention states over disjoint tokens: (out, lse) becomes the state over both.
// out, other: [D]. A state with lse = -inf is the identity. Associative up to rounding.
void MergeAttention(float* out, float* lse, const float* other, float other_lse,
                    std::int32_t head_dim);

struct BackendInfo {
  std::string name;  // "ref", "cpu/portable", "cpu/avx2", "cpu/avx512", "cpu/amx"
  std::string description;
  bool available = false;
  std::string reason;  // why not, when it is not available
};

// All backends of this build, best last. Never throws.
std::vector<BackendInfo> ListBackends();

// Creates a backend by name. "cpu" or "" takes the best CPU kernels of this machine. n_threads <= 0
// takes all processors this process may use. Throws Error(kUsage) for an unknown name (listing the
// valid ones) and Error(kUnsupported) with the reason where the machine lacks what the backend
// needs.
std::unique_ptr<Backend> MakeBackend(std::string_view name, int n_threads);

}  // namespace fathom
