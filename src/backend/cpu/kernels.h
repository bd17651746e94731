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
inline constexpr int kAttendListRows = 256;         // rows per call of attend_listed, at most
inline constexpr int kAttendDenseRows = 512;        // rows per call of attend_dense, at most
inline constexpr int kSelectSlack = 16;  // elements that top_k may write beyond its candidates

struct PackCodesArgs {
  const float* x;       // [64][head_dim]
  const float* offset;  // [head_dim] subtracted from x
  const float* cell;    // [head_dim] width of a code; 0 gives code 8
  std::uint64_t* planes;
  std::int32_t head_dim;
  std::int32_t segment_blocks;
  std::int32_t block;
};

// Blocks first .. first + count - 1 of one segment; scores of head h start at scores + h * stride.
struct ScanMeanArgs {
  const std::uint64_t* planes;
  const std::uint8_t* side;
  std::int32_t segment_blocks;
  std::int32_t mean_bits;
  std::int32_t first;
  std::int32_t count;
  std::int32_t group;
  // ScanTable
  std::int32_t n_planes;
  std::int32_t n_active;
  const std::int32_t* plane;
  const std::int16_t* weight;
  const std::int32_t* channel;
  const std::int32_t* mean_weight;
  const std::int32_t* weight_sum;
  const float* scale;
  float* scores;
  std::int64_t stride;
};

struct ScanPaperArgs {
  const std::uint64_t* planes;
  const Half* scales;
  std::int32_t segment_blocks;
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
struct AttendChunkArgs {
  const Half* rows;
  const float* q;              // [group][head_dim]
  const std::int32_t* tokens;  // [n_rows] (attend_listed)
  const std::uint16_t* mask;   // [n_rows] (attend_listed)
  std::int32_t n_rows;
  std::int32_t head_dim;
  std::int32_t group;
  float scale;
  float* out;  // [group][head_dim]
  float* top;  // [group]
  float* sum;  // [group]
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
  void (*scan_mean)(const ScanMeanArgs* args);
  void (*scan_paper)(const ScanPaperArgs* args);
  void (*score_rows)(const ScoreRowsArgs* args);
  void (*scan_labels)(const ScanLabelsArgs* args);
  void (*mass_blocks)(const MassBlocksArgs* args);
  void (*top_k)(const TopKArgs* args);
  void (*attend_listed)(const AttendChunkArgs* args);
  void (*attend_dense)(const AttendChunkArgs* args);
  std::int64_t (*prefill_scratch)(int rows, int head_dim);
  void (*prefill_tile)(const PrefillTileArgs* args);
};

const KernelTable* PortableKernels();
const KernelTable* Avx2Kernels();
const KernelTable* Avx512Kernels();

}  // namespace fathom::cpu
