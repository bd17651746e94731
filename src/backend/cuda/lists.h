// SPDX-License-Identifier: MIT
// What the kernels of a decode step hand to each other on the device. All structs are plain, passed
// to kernels by value; every pointer is device memory (or host memory mapped for the device where
// it says so) and borrowed.
//
// A *head* here is one KV head of one sequence of the batch: head = sequence * n_kv_heads +
// kv_head. A *list* is one query head of it: list = head * group + h. All kernels take one layer
// and all heads of the batch in one launch; lengths are read from device memory, so that a captured
// graph can be replayed while sequences grow.
#pragma once

#include <cstdint>

#include "fathom/types.h"

#ifdef __CUDACC__
#define FATHOM_HD __host__ __device__
#else
#define FATHOM_HD
#endif

namespace fathom::cuda {

// How long a sequence is; one per sequence of the batch, in device memory.
struct Lengths {
  std::int32_t n_tokens;  // visible, the current one included
  std::int32_t n_blocks;  // finished blocks in the index
  std::int32_t first;     // candidates are tokens [first, last): as SelectArgs
  std::int32_t last;
  std::int32_t keep;  // winners per query head; 0: the step is dense, all tokens are attended
};

// Scores as integers that sort alike: larger is better, NaN is below everything.
FATHOM_HD inline std::uint32_t OrderedScore(float score) {
  union {
    float f;
    std::uint32_t u;
  } bits{score};
  if ((bits.u & 0x7FFFFFFFu) > 0x7F800000u) return 0;
  if (bits.u == 0x80000000u) bits.u = 0;  // -0 ties with 0
  return (bits.u & 0x80000000u) ? ~bits.u : bits.u | 0x80000000u;
}
FATHOM_HD inline float ScoreOf(std::uint32_t ordered) {
  union {
    std::uint32_t u;
    float f;
  } bits{(ordered & 0x80000000u) ? ordered & 0x7FFFFFFFu : ~ordered};
  return bits.f;
}
// A candidate: larger keys are better, and of equal scores the smaller token is.
FATHOM_HD inline std::uint64_t CandidateKey(float score, std::int32_t token) {
  return (static_cast<std::uint64_t>(OrderedScore(score)) << 32) |
         (0xFFFFFFFFu - static_cast<std::uint32_t>(token));
}
FATHOM_HD inline std::int32_t TokenOf(std::uint64_t key) {
  return static_cast<std::int32_t>(0xFFFFFFFFu - static_cast<std::uint32_t>(key));
}

// Tokens whose score reached a limit, in no order. count may exceed capacity: what did not fit is
// lost, and the list must be made again from all scores.
struct Candidates {
  std::uint64_t* keys;  // [n_lists][capacity]
  std::int32_t* count;  // [n_lists], zeroed before the scan
  std::int32_t capacity;
  const float* least;  // [n_lists] the limit: tokens with score >= least are candidates
};

// Where a scan leaves its scores. Tokens are taken in tiles of 1024 (16 blocks) from token 0.
//  - scores: with tile_step 1 those of all tokens, at scores[list * stride + token]. tile_step > 1
//    asks for a sample of one token in tile_step, of places the scan likes: SampleTokens scores of
//    each list, -inf for those that are no candidates (outside [first, last)) and where there is
//    nothing to fill with. Heads with only[head] == 0 are skipped when `only` is given.
//  - else candidates.
struct ScoreSink {
  float* scores;
  std::int64_t stride;
  std::int32_t tile_step;
  const std::int32_t* only;
  Candidates candidates;
};
constexpr int kTileBlocks = 16;
constexpr int kTileTokens = kTileBlocks * kBlockTokens;

// Tiles of a piece of n_blocks blocks; the last may be partly filled.
FATHOM_HD inline std::int32_t TilesOf(std::int32_t n_blocks) {
  return (n_blocks + kTileBlocks - 1) / kTileBlocks;
}

// Tokens that a scan would leave in the sample of a sequence with n_blocks blocks: whole tiles.
FATHOM_HD inline std::int32_t SampleTokens(std::int32_t n_blocks, std::int32_t tile_step) {
  return (TilesOf(n_blocks) + tile_step - 1) / tile_step * kTileTokens;
}

// The winners of a head: what it attends. Ascending; bit h of mask: query head h attends the token.
// Sinks, window and tail are among them.
struct Attended {
  std::int32_t* tokens;  // [n_heads][capacity]
  std::uint16_t* mask;   // [n_heads][capacity]
  std::int32_t* count;   // [n_heads]; -1: the step is dense, all tokens are attended
  std::int32_t capacity;
};

}  // namespace fathom::cuda
