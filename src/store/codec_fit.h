// SPDX-License-Identifier: MIT
// Fitting the mean codec (design 3.1 points 1 and 2): steps from two passes over the keys, decoders
// and distortions from sums over packed blocks. Nothing here is thread-safe or parallel: callers
// work on different heads at a time.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "fathom/backend.h"
#include "fathom/stats.h"
#include "fathom/store.h"

namespace fathom {

class StateReader;
class StateWriter;

// Blocks of keys of one KV head, centred and in the basis of the index.
class BlockReader {
 public:
  // rows: [..][2][D]; borrowed, as the basis is.
  BlockReader(const Half* rows, const Basis& basis);
  // x: [64][D], valid until the next Load.
  const float* Load(std::int64_t block);

 private:
  const Half* rows_;
  const Basis& basis_;
  std::vector<float> keys_;  // [64][D] as stored
  std::vector<float> x_;     // [64][D] mapped
};

// Sums over packed blocks of one codec from which its decoders and distortions follow, per channel,
// in double. With sigma_p the bipolar bits of the 4-bit code, times the block's scale in the paper
// codec: every decoder is linear in them, so no second pass over the keys is needed.
class CodecSums {
 public:
  CodecSums() = default;
  explicit CodecSums(std::int32_t head_dim) : channels_(static_cast<std::size_t>(head_dim)) {}

  // Adds the block that Backend::Pack has written from these arguments (x, means and planes are
  // read).
  void AddBlock(const PackArgs& args);
  void Merge(const CodecSums& other);

  // Least-squares weights [D][4][4] of the bits for every number of planes; see MeanCodec::weight.
  // Requires a block.
  std::vector<float> FitWeights() const;
  // Sums of squared errors [kLevels][D] of all levels, decoded with `weight`.
  std::vector<double> Errors(const std::vector<float>& weight) const;

  void Save(StateWriter* out) const;
  // Throws Error(kCorrupt).
  void Load(StateReader* in, std::int32_t head_dim);

 private:
  struct Channel {
    double xx = 0;      // sum x^2
    double yy = 0;      // sum y^2, y = x - quantized block mean (x in the paper codec)
    double square = 0;  // sum sigma_p^2, the same for all p
    std::array<double, kPlanes> right{};                    // sum sigma_p y
    std::array<double, kPlanes*(kPlanes - 1) / 2> cross{};  // sum sigma_p sigma_q, p < q, see Pair
  };

  static double Gram(const Channel& c, int p, int q);

  std::vector<Channel> channels_;
};

// Weights [D][4][4] of cell centres: ranges[j] * 2^-(p+1) for bit p, whatever the number of planes.
std::vector<float> CentreWeights(const std::vector<float>& ranges);

// Means of a block as Pack keeps them, decoded: mean [D] of x [64][D], codes within +-limit.
void QuantizedBlockMeans(const float* x, int limit, const std::vector<float>& step, float* mean);

// Multiples of the rms, [D], by Ranges::kMeasured. Looks at no more than 256 of the blocks.
std::vector<float> FitRangeMultiples(BlockReader& reader, std::int64_t first, std::int64_t n_blocks,
                                     int mean_limit, const std::vector<float>& mean_step,
                                     const std::vector<float>& rms);

// How many root mean squares of the block means the mean codes cover: of the blocks that are coded
// with them, and of those before blocks to come. Keys drift with their positions where rotary
// frequencies are low, so what comes lies further out than what was: covering twice as much cost
// SmolLM2, frozen at half of 8k tokens, 4 % of error where covering 4 cost 20 %.
inline constexpr double kMeanReach = 4;
inline constexpr double kMeanReachAhead = 8;

// Frozen steps of blocks first .. first + n_blocks - 1; weights are left empty. Requires n_blocks >
// 0.
MeanCodec FitSteps(BlockReader& reader, std::int64_t first, std::int64_t n_blocks,
                   const IndexShape& shape, Ranges ranges, double mean_reach);

// Steps and decoders of these blocks. They are packed into scratch memory only.
MeanCodec FitCodec(BlockReader& reader, std::int64_t first, std::int64_t n_blocks,
                   const IndexShape& shape, const IndexRules& rules, double mean_reach,
                   const Backend& backend);

}  // namespace fathom
