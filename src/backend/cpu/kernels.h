// SPDX-License-Identifier: MIT
// The kernels of the CPU backend: one table of functions per instruction set.
//
// The tables are compiled with flags the machine may lack, so the files behind them use only plain
// structs, intrinsics and functions of an anonymous namespace: an inline function or template of
// another header compiled there could be the copy that the linker keeps for the whole program.
// tests/kernel_symbols.cmake checks the object files for that. This header follows the same
// rule: no standard containers, no inline functions.
//
// Kernels are single-threaded, never allocate, and cover a piece of work whose size is fixed by the
// driver, so that results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "fathom/types.h"

namespace fathom::cpu {

inline constexpr int kScanChunkBlocks = 64;         // blocks per call of the scan kernels, at most
inline constexpr int kLabelScratchBytes = 1 << 17;  // of scan_labels, at least 16 blocks' rows
inline constexpr int kMassChunkBlocks = 128;        // blocks per call of mass_blocks, at most
inline constexpr int kAttendListRows = 128;         // rows of a chunk of listed rows, at most
inline constexpr int kWeighChunkBlocks = 64;        // blocks per call of weigh_blocks, at most
inline constexpr int kAttendDenseRows = 512;        // rows per call of attend_dense, at most
// Elements that top_k may write beyond its candidates, rank_keys and kth_key beyond their keys.
inline constexpr int kSelectSlack = 16;

struct PackCodesArgs {
  const float* x;       // [64][head_dim]
  const float* offset;  // [head_dim] subtracted from x
  const float* cell;    // [head_dim] width of a code; 0 gives code 8
  std::uint64_t* planes;
  std::int32_t head_dim;
  std::int32_t row_blocks;
  std::int32_t block;
};

// A ScanTable in the form a kernel set scans by. The layout is the set's own.
struct ScanPlanArgs {
  std::int32_t row_blocks;  // of the planes
  std::int32_t group;
  std::int32_t n_planes;
  std::int32_t n_parts;
  const std::int32_t* plane;
  const std::int32_t* part_end;
  const std::int16_t* weight;
  const std::int32_t* low;
  void* out;  // scan_plan_bytes(n_planes, group) bytes, 64-byte aligned
};

// U of blocks first .. first + count - 1 of one segment, at most kScanChunkBlocks; of head h and
// the i-th of these blocks at sums + h * stride + i * 64.
struct ScanSumsArgs {
  const void* plan;  // of scan_plan
  const std::uint64_t* planes;
  // Planes of the segment that will be read next, with rows as far apart as these, or null.
  const std::uint64_t* prefetch;
  const std::uint8_t* side;  // [side_bytes] what scan_base will read after this, or null
  std::int64_t side_bytes;
  std::int32_t first;  // block, even
  std::int32_t count;
  std::int32_t group;
  std::uint8_t* sums;
  std::int64_t stride;
};

// The means' weights of a ScanTable in the form a kernel set multiplies by, where it wants one.
struct ScanBasePlanArgs {
  std::int32_t segment_blocks;
  std::int32_t mean_bits;
  std::int32_t group;
  std::int32_t n_active;
  const std::int32_t* channel;
  const std::int32_t* mean_weight;
  const std::int32_t* constant;
  void* out;  // scan_base_plan_bytes(n_active, group) bytes, 64-byte aligned
};

// `base` of the same blocks; of head h and the i-th block at base + h * stride + i.
struct ScanBaseArgs {
  const void* plan;  // of scan_base_plan; null where the set has none
  const std::uint8_t* side;
  std::int32_t segment_blocks;
  std::int32_t mean_bits;
  std::int32_t first;  // block, even
  std::int32_t count;
  std::int32_t group;
  std::int32_t n_active;
  const std::int32_t* channel;
  const std::int32_t* mean_weight;
  const std::int32_t* constant;
  std::int32_t* base;
  std::int64_t stride;
  // Means that will be read next, or null: fetched meanwhile by sets that have a plan.
  const std::uint8_t* ahead;
  std::int64_t ahead_bytes;
};

// Scores of n_blocks blocks of one head.
struct ScanScoresArgs {
  const std::uint8_t* sums;
  const std::int32_t* base;
  std::int64_t n_blocks;
  std::int32_t shift;
  float scale;
  float* scores;  // [n_blocks][64]
};

// Candidates and their rest in n_blocks blocks of one head that share a ScanTable.
struct RankBlocksArgs {
  const std::uint8_t* sums;
  const std::int32_t* base;
  std::int64_t n_blocks;
  std::int64_t first;  // tokens first .. last - 1, counted from the first of these blocks, may be
  std::int64_t last;   // candidates; first and last may lie outside
  std::int32_t shift;
  std::int32_t threshold;     // T that a candidate has at least; within +-2^25
  std::uint64_t* candidates;  // [n_blocks] bit i for token i
  // Tokens that may be candidates and are not: rest = sum of exp(slope * (T - origin)). slope 0
  // leaves rest alone.
  float slope;
  float origin;
  float* rest;  // [n_blocks]
};

struct ScanPaperArgs {
  const std::uint64_t* planes;
  const Half* scales;
  std::int32_t segment_blocks;
  std::int32_t row_blocks;  // of the planes
  std::int32_t first;
  std::int32_t count;
  std::int32_t group;
  std::int32_t head_dim;
  const float* q;             // [group][head_dim]
  const std::uint8_t* depth;  // [head_dim]
  float* scores;
  std::int64_t stride;
};

struct ScoreRowsArgs {
  const Half* rows;  // [n_rows][2][head_dim]
  const float* q;    // [group][head_dim]
  float* scores;
  std::int64_t stride;
  std::int64_t n_rows;
  std::int64_t key_stride;  // halfs from one row to the next
  std::int32_t head_dim;
  std::int32_t group;
};

// Blocks first .. first + count - 1 of one segment of labels; scores of head h start at scores + h
// * stride. first is a multiple of 16, count at most kScanChunkBlocks.
struct ScanLabelsArgs {
  LabelLayout layout;
  std::int32_t planes;
  std::int32_t segment_blocks;
  std::int32_t first;
  std::int32_t count;
  std::int32_t group;
  std::int32_t n_channels;
  const std::uint8_t* codes;
  const Half* scales;
  const std::int32_t* channels;  // [n_channels] (kChannels)
  const float* q;                // [group][n_channels]
  float* scores;
  std::int64_t stride;
  std::int32_t* scratch;  // kLabelScratchBytes, 64-byte aligned (kChannels)
};

// Blocks of one query head; scores: [n_blocks][64].
struct MassBlocksArgs {
  const float* scores;
  std::int64_t n_blocks;
  float scale;
  float shift;
  float* mass;  // [n_blocks]
};

// Keys of the tokens of a piece that are marked, or listed: those of the order of their scores.
struct RankKeysArgs {
  const std::uint8_t* sums;
  const std::int32_t* base;
  std::int32_t shift;
  float scale;
  // Either the marks of n blocks, bit i for token i, or n tokens.
  const std::uint64_t* marks;
  const std::int32_t* tokens;
  std::int64_t n;
  std::int32_t* keys;  // out, with room for kSelectSlack more
};

// Tokens that any head of a group has marked, with the heads that have.
struct RankUnionArgs {
  const std::uint64_t* marks;  // of head h and block b at marks + h * stride + b
  std::int64_t stride;
  std::int32_t group;
  std::int64_t first;  // block
  std::int64_t count;
  std::int32_t* tokens;  // out; null: only counted
  std::uint16_t* mask;   // out
};

// The `keep` best of n scores, as ascending indices plus `first`. Scratch: n + kSelectSlack each.
struct TopKArgs {
  const float* scores;
  std::int64_t n;
  std::int64_t keep;
  std::int32_t first;
  std::int32_t* winners;
  std::int32_t* scratch_index;
  std::int32_t* scratch_key;
};

// One chunk of rows for all heads of a group. Out: the unfinished state, which the driver joins:
// out = sum exp(s - top) v, sum = sum exp(s - top); top = -inf where a head attends nothing.
struct AttendDenseArgs {
  const Half* rows;
  const float* q;  // [group][head_dim]
  std::int32_t n_rows;
  std::int32_t head_dim;
  std::int32_t group;
  float scale;
  float* out;  // [group][head_dim]
  float* top;  // [group]
  float* sum;  // [group]
};

// A run of chunks of listed rows of one KV head: chunk_rows rows each, but for the last. What
// belongs to chunk c is at the pointer plus c times its size; states are as in AttendDenseArgs.
struct AttendListArgs {
  const Half* rows;
  const float* q;              // [group][head_dim]
  const std::int32_t* tokens;  // [n_rows]
  const std::uint16_t* mask;   // [n_rows]
  std::int64_t n_rows;
  std::int32_t chunk_rows;  // at most kAttendListRows
  std::int32_t head_dim;
  std::int32_t group;
  float scale;
  float* out;  // [group][head_dim]
  float* top;  // [group]
  float* sum;  // [group]
  // Lazy values, or null: rows whose scaled score is below limit are left out of `out`.
  const float* limit;      // [group]
  float* light;            // [group] sum of exp(s - top) of the rows left out; zeros without limit
  std::int32_t* n_values;  // rows of which the value was read
};

// n_blocks blocks of one KV head: out[h] = sum of mass means over the blocks with mass > least for
// some head, other[h] = sum of mass over the rest.
struct WeighBlocksArgs {
  const Half* means;   // [n_blocks][head_dim], or null: no block is read
  const float* mass;   // of head h at mass + h * stride
  const float* least;  // [group]
  std::int64_t stride;
  std::int32_t n_blocks;
  std::int32_t head_dim;
  std::int32_t group;
  float* out;            // [group][head_dim]
  float* other;          // [group]
  std::int32_t* n_read;  // blocks
};

// Query positions first .. first + n_positions - 1 of one KV head, all keys they see.
struct PrefillTileArgs {
  const Half* rows;  // [first + n_positions][2][head_dim]
  const float* q;    // position t, head h of the group: q + t * stride + h * head_dim
  float* out;        // likewise
  std::int64_t stride;
  std::int64_t first;
  std::int32_t n_positions;
  std::int32_t head_dim;
  std::int32_t group;
  float scale;
  float* scratch;  // prefill_scratch(n_positions * group, head_dim) floats, 64-byte aligned
};

struct KernelTable {
  const char* isa;  // the last part of the backend's name
  void (*pack_sums)(const float* x, int head_dim, float* sums);      // over 64 tokens, in order
  void (*pack_maxima)(const float* x, int head_dim, float* maxima);  // of |x|, NaN ignored
  void (*pack_codes)(const PackCodesArgs* args);
  std::int64_t (*scan_plan_bytes)(int n_planes, int group);
  void (*scan_plan)(const ScanPlanArgs* args);
  void (*scan_sums)(const ScanSumsArgs* args);
  // Both null for a set that takes the weights as they are.
  std::int64_t (*scan_base_plan_bytes)(int n_active, int group);
  void (*scan_base_plan)(const ScanBasePlanArgs* args);
  void (*scan_base)(const ScanBaseArgs* args);
  void (*scan_scores)(const ScanScoresArgs* args);
  void (*scan_paper)(const ScanPaperArgs* args);
  void (*score_rows)(const ScoreRowsArgs* args);
  void (*scan_labels)(const ScanLabelsArgs* args);
  void (*mass_blocks)(const MassBlocksArgs* args);
  void (*top_k)(const TopKArgs* args);
  void (*rank_blocks)(const RankBlocksArgs* args);
  std::int64_t (*rank_keys)(const RankKeysArgs* args);    // returns how many
  std::int64_t (*rank_union)(const RankUnionArgs* args);  // returns how many
  // The rank-th largest of n keys; room for kSelectSlack more.
  std::int32_t (*kth_key)(std::int32_t* keys, std::int64_t n, std::int64_t rank);
  void (*attend_listed)(const AttendListArgs* args);
  // Only top and sum, of all n_rows <= kAttendListRows rows as one chunk.
  void (*attend_keys)(const AttendListArgs* args);
  void (*attend_dense)(const AttendDenseArgs* args);
  void (*weigh_blocks)(const WeighBlocksArgs* args);
  std::int64_t (*prefill_scratch)(int rows, int head_dim);
  void (*prefill_tile)(const PrefillTileArgs* args);
};

const KernelTable* PortableKernels();
const KernelTable* Avx2Kernels();
const KernelTable* Avx512Kernels();
const KernelTable* Avx512VbmiKernels();
// The same sets with the scan by masked adds, to compare with.
const KernelTable* Avx2MaskedKernels();
const KernelTable* Avx512MaskedKernels();
const KernelTable* AmxKernels();  // avx512vbmi, with prefill in tiles of bf16

}  // namespace fathom::cpu
