// SPDX-License-Identifier: MIT
// From scores to what is attended: a limit from a sample, the best `keep` of each list, the union
// over a group, and masses of blocks. All selections are exact and follow the order of CandidateKey
// (lists.h), so they equal `ref` to the last token.
//
// Every function launches kernels on the stream and returns: it allocates nothing, waits for
// nothing and can be captured into a graph. All pointers are device memory. With n_lists == 0
// nothing is launched. Lists of sequences with Lengths::keep == 0 (dense steps) are left as they
// are unless said otherwise. Tokens are below 2^30. n_lists is a multiple of group, and lengths has
// one entry per sequence: lengths[list / group / n_kv_heads]. Throws Error when a launch is
// refused.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/lists.h"

namespace fathom::cuda {

// A limit that about 2 * keep + 8 * tile_step tokens reach: the r-th largest score of a sample,
// r = 2 * ceil(keep / tile_step) + 8, or all of the sample if that is less. -inf where the sample
// holds fewer than r scores above -inf (NaN is none): then every token but a NaN is a candidate.
// Lists of dense steps get +inf.
struct SampleLimits {
  const float* sample;  // [n_lists][stride], 16-byte aligned, the first
                        // SampleTokens(n_blocks, tile_step) of each; -inf for no candidate
  std::int64_t stride;  // a multiple of 4
  std::int32_t tile_step;
  std::int32_t group, n_kv_heads, n_lists;
  const Lengths* lengths;
  float* least;  // [n_lists] out
  // For what comes next, set to 0 if not null: Candidates::count [n_lists], and redo by KV head.
  std::int32_t* count;
  std::int32_t* redo;
};
void FindLimits(const SampleLimits& args, cudaStream_t stream);

// The best `keep` candidates of each list. Where there are fewer than keep, or more than capacity,
// redo[head] becomes 1 and all of the list is undefined: Select(SelectScores) makes it.
constexpr std::int32_t kMaxCandidates = 16384;
struct SelectCandidates {
  Candidates candidates;  // capacity <= kMaxCandidates; keys are distinct
  std::int32_t group, n_kv_heads, n_lists;
  const Lengths* lengths;
  std::int32_t max_keep;   // >= keep of every sequence
  std::int32_t* winners;   // [n_lists][max_keep] out: tokens, in no order; keep of them
  std::uint64_t* kth_key;  // [n_lists] out: key of the least winner; winners are the candidates
                           // with key >= kth_key
  float* cut;              // [n_lists] out: score of the least winner, NaN for a NaN
  std::int32_t* redo;      // [n_heads], zeroed by the caller before
};
void Select(const SelectCandidates& args, cudaStream_t stream);

// The same from all scores, for those heads that need it. Scores may be anything.
struct SelectScores {
  const float* scores;  // [n_lists][stride]; tokens [first, last) of Lengths are read
  std::int64_t stride;
  std::int32_t group, n_kv_heads, n_lists;
  const Lengths* lengths;  // 0 <= keep <= last - first
  std::int32_t max_keep;
  std::int32_t* winners;     // as above
  std::uint64_t* kth_key;    // as above
  float* cut;                // as above
  const std::int32_t* redo;  // [n_heads] heads with 0 are left as they are; null: all are done
};
void Select(const SelectScores& args, cudaStream_t stream);

// What the heads of a group attend together: the winners of its lists, and tokens [0, first) and
// [last, n_tokens), which all attend. With expand > 1 a winner w is a chunk and stands for tokens
// w * expand ... w * expand + expand - 1, of which those at or beyond n_tokens are left out;
// Lengths are in tokens all the same, but for keep, which counts winners. Heads of dense steps get
// count = -1.
//
// bitmap and masks are scratch that is zero before and zero again after.
struct JoinWinners {
  const std::int32_t* winners;  // [n_lists][max_keep]
  std::int32_t max_keep;
  std::int32_t expand;  // >= 1
  std::int32_t group, n_kv_heads, n_lists;
  const Lengths* lengths;
  std::uint32_t* bitmap;        // [n_heads][words_per_head], 16-byte aligned
  std::uint16_t* masks;         // [n_heads][max_tokens], 4-byte aligned
  std::int64_t words_per_head;  // a multiple of 4, at least max_tokens / 32
  std::int64_t max_tokens;      // even, at least n_tokens of every sequence
  // Its lists are read back by the kernel: device memory. Where more than capacity tokens are
  // attended, those that do not fit are lost and count is capacity.
  Attended out;
};
void Join(const JoinWinners& args, cudaStream_t stream);

// Masses of blocks, as Backend::Mass:
//   mass[list][b] = sum over the 64 tokens of block b of exp(min(scale * score - shift, 88)).
// Listed tokens are left out: their scores become -inf first. Unlike elsewhere, lengths with
// keep == 0 are done too, and where listed.count < 0 nothing is listed.
struct BlockMasses {
  float* scores;        // [n_lists][stride], 16-byte aligned; the finished blocks' tokens
  std::int64_t stride;  // a multiple of 4
  const float* shift;   // [n_lists]
  float* mass;          // [n_lists][mass_stride] out, n_blocks of each
  std::int64_t mass_stride;
  std::int32_t group, n_kv_heads, n_lists;
  const Lengths* lengths;   // n_blocks is read
  std::int32_t max_blocks;  // >= n_blocks of every sequence: the grid's size
  float scale;
  Attended listed;  // null tokens: none
};
void Mass(const BlockMasses& args, cudaStream_t stream);

}  // namespace fathom::cuda
