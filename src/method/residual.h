// SPDX-License-Identifier: MIT
// The residual mass (design 3.1 point 5): what the tokens that were not fetched add to attention,
// estimated from the scan's own scores. A stage after selection, the same for every method whose
// scores estimate q.k.
//
//   out = (sum_winners w_i v_i + a_h sum_rest m_i v) / (sum_winners w_i + a_h sum_rest m_i)
//
// with m_i = exp(estimated score + noise/2) and v the mean value of the session (`mean`), or of the
// token's block where the block matters (`block`). a_h is fitted per query head on a few queries at
// the end of the prefill, against dense attention.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fathom/store.h"

namespace fathom {

class StateReader;
class StateWriter;

enum class ResidualRule : std::uint8_t { kOff, kMean, kBlock };

// A block's own mean is read when, for some head of the group, the block has more than this share
// of all mass, attended and not; so no head asks for more than 1000 blocks. What the others lose by
// the mean of the session is below .1 % of the error on captures of 8k and 32k tokens.
inline constexpr float kLeastBlockShare = 1e-3F;

// Mean values of one KV head's finished blocks: of all blocks together and, for
// ResidualRule::kBlock, of each, in fp16.
class ValueMeans {
 public:
  ValueMeans(std::int32_t head_dim, ResidualRule rule);

  // Makes the means those of tokens skip .. n_tokens - 1; n_tokens is a whole number of blocks and
  // skip (the sinks) always the same. Reads the rows of blocks that are new; going back, of at most
  // kCheckpointBlocks. rows: [..][2][D].
  void MoveTo(const Half* rows, std::int64_t n_tokens, std::int64_t skip);
  // Forgets blocks that hold tokens from n_tokens on, and up to kCheckpointBlocks - 1 before them,
  // which the next MoveTo reads again: then all is as if they had never been seen.
  void Truncate(std::int64_t n_tokens);
  void Clear();
  void Save(StateWriter* out) const;
  // Throws Error(kCorrupt) where it is not of the same head_dim and rule.
  void Load(StateReader* in);

  // [D] of all blocks together; zeros without any.
  std::span<const float> mean() const { return mean_; }
  // Whether no channel of mean() is NaN or inf.
  bool is_finite() const { return is_finite_; }
  // [n_tokens / 64][D]; null but for ResidualRule::kBlock.
  const Half* block_means() const {
    return rule_ == ResidualRule::kBlock ? block_mean_.data() : nullptr;
  }

  // Of the block means; the mean of all is too small to count.
  static std::int64_t Bytes(std::int32_t head_dim, ResidualRule rule, std::int64_t n_tokens) {
    return rule == ResidualRule::kBlock
               ? n_tokens / kBlockTokens * head_dim * std::int64_t{sizeof(Half)}
               : 0;
  }
  std::int64_t MemoryBytes() const { return Bytes(dim_, rule_, n_tokens_); }
  std::int64_t n_tokens() const { return n_tokens_; }

 private:
  static constexpr std::int64_t kCheckpointBlocks = 64;

  void FindMean(std::int64_t skip);

  std::int32_t dim_;
  ResidualRule rule_;
  std::int64_t n_tokens_ = 0;
  std::vector<Half> block_mean_;  // [n_tokens / 64][D]
  std::vector<double> total_;     // [D] sum of the values of tokens skip .. n_tokens - 1
  // total_ after every kCheckpointBlocks blocks, [n_blocks / kCheckpointBlocks][D].
  std::vector<double> checkpoint_;
  std::vector<float> mean_;  // [D]
  bool is_finite_ = true;
};

// What one fitting query showed of one query head.
struct ResidualSample {
  std::vector<float> out;    // [D] attention over the selected tokens
  std::vector<float> rest;   // [D] sum_rest m_i v, in units of the selected tokens' sum of exp
  double mass = 0;           // sum_rest m_i, likewise
  std::vector<float> dense;  // [D] attention over all tokens
};

// The factor in 0, 0.05, .. 1.2 with the least sum of relative L2 errors; 0 without samples whose
// estimate is usable.
float FitResidualFactor(std::span<const ResidualSample> samples);

}  // namespace fathom
