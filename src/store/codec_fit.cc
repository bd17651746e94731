// SPDX-License-Identifier: MIT
#include "store/codec_fit.h"

#include <Eigen/Cholesky>
#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstddef>

#include "base/half.h"
#include "memory/aligned_buffer.h"
#include "memory/state_stream.h"
#include "store/layout.h"

namespace fathom {
namespace {

constexpr double kSmallestStep =
    1e-9;  // added to steps and ranges: constant channels must not divide by zero
constexpr double kRidge =
    1e-6;  // of the Gram matrix' diagonal: channels whose planes are all alike stay solvable

std::size_t Size(std::int32_t n) { return static_cast<std::size_t>(n); }

// Index of the pair p < q among the six of four planes.
constexpr std::size_t Pair(int p, int q) {
  return static_cast<std::size_t>(p * (2 * kPlanes - p - 1) / 2 + q - p - 1);
}
static_assert(Pair(0, 1) == 0 && Pair(0, 3) == 2 && Pair(1, 2) == 3 && Pair(2, 3) == 5);

// Means of a block [D], by the rule of Backend::Pack: single precision, in token order.
void BlockMeans(const float* x, std::int32_t dim, float* mean) {
  std::fill_n(mean, dim, 0.0f);
  for (std::int32_t i = 0; i < kBlockTokens; ++i) {
    const float* token = x + static_cast<std::ptrdiff_t>(i) * dim;
    for (std::int32_t j = 0; j < dim; ++j) mean[j] += token[j];
  }
  for (std::int32_t j = 0; j < dim; ++j) mean[j] /= kBlockTokens;
}

// Keys that are NaN or inf must not make a step that Pack cannot divide by.
float ToStep(double step) {
  return std::isfinite(step) ? static_cast<float>(step + kSmallestStep) : 1.0f;
}

// The largest code is `reach` root mean squares of the block means about 0, the mean of all keys.
std::vector<float> FitMeanSteps(BlockReader& reader, std::int64_t first, std::int64_t n_blocks,
                                std::int32_t dim, int limit, double reach) {
  std::vector<double> square(Size(dim));
  std::vector<float> mean(Size(dim));
  for (std::int64_t b = first; b < first + n_blocks; ++b) {
    BlockMeans(reader.Load(b), dim, mean.data());
    for (std::size_t j = 0; j < mean.size(); ++j) {
      square[j] += static_cast<double>(mean[j]) * mean[j];
    }
  }
  std::vector<float> step(Size(dim));
  for (std::size_t j = 0; j < step.size(); ++j) {
    step[j] = ToStep(reach * std::sqrt(square[j] / static_cast<double>(n_blocks)) / limit);
  }
  return step;
}

// Root mean square of what the quantized means leave.
std::vector<double> ResidualRms(BlockReader& reader, std::int64_t first, std::int64_t n_blocks,
                                int limit, const std::vector<float>& step) {
  const auto dim = static_cast<std::int32_t>(step.size());
  std::vector<double> sum(step.size());
  std::vector<float> mean(step.size());
  for (std::int64_t b = first; b < first + n_blocks; ++b) {
    const float* x = reader.Load(b);
    QuantizedBlockMeans(x, limit, step, mean.data());
    for (std::size_t i = 0; i < kBlockTokens; ++i, x += dim) {
      for (std::size_t j = 0; j < step.size(); ++j) {
        const double y = x[j] - mean[j];
        sum[j] += y * y;
      }
    }
  }
  const double n = static_cast<double>(n_blocks * kBlockTokens);
  for (double& x : sum) x = std::sqrt(x / n);
  return sum;
}

// What the block's bits are worth: the scale that Pack stored in the paper codec, else 1, since the
// mean codec's weights hold the step.
double BitScale(const PackArgs& args, std::int32_t channel) {
  if (args.codec == Codec::kMean) return 1.0;
  const auto* scales = reinterpret_cast<const Half*>(args.side);
  return HalfToFloat(scales[Size(channel) * Size(args.segment_blocks) + Size(args.block)]);
}

// The mean that Pack stored for a channel of a block.
int StoredMean(const PackArgs& args, std::int32_t channel) {
  const std::size_t row = layout::SideRowBytes(Codec::kMean, args.mean_bits, args.segment_blocks);
  const std::uint8_t* side = args.side + Size(channel) * row;
  if (args.mean_bits == 8) return static_cast<std::int8_t>(side[args.block]);
  return layout::UnpackNibble(side[args.block / 2], args.block);
}

}  // namespace

void QuantizedBlockMeans(const float* x, int limit, const std::vector<float>& step, float* mean) {
  BlockMeans(x, static_cast<std::int32_t>(step.size()), mean);
  const auto lim = static_cast<float>(limit);
  for (std::size_t j = 0; j < step.size(); ++j) {
    mean[j] = std::clamp(std::nearbyint(mean[j] / step[j]), -lim, lim) * step[j];
  }
}

BlockReader::BlockReader(const Half* rows, const Basis& basis)
    : rows_(rows),
      basis_(basis),
      keys_(kBlockTokens * Size(basis.dim)),
      x_(kBlockTokens * Size(basis.dim)) {}

const float* BlockReader::Load(std::int64_t block) {
  const std::int64_t dim = basis_.dim;
  const Half* key = rows_ + block * kBlockTokens * 2 * dim;
  for (std::int64_t i = 0; i < kBlockTokens; ++i) {
    ConvertHalfToFloat(key + i * 2 * dim, dim, keys_.data() + i * dim);
  }
  basis_.MapKeys(keys_.data(), kBlockTokens, x_.data());
  return x_.data();
}

void CodecSums::AddBlock(const PackArgs& args) {
  assert(channels_.size() == Size(args.head_dim));
  const std::size_t dim = channels_.size();
  for (std::size_t j = 0; j < dim; ++j) {
    Channel& c = channels_[j];
    const auto channel = static_cast<std::int32_t>(j);
    const float mean = args.codec == Codec::kMean
                           ? static_cast<float>(StoredMean(args, channel)) * args.mean_step[j]
                           : 0.0F;
    const double scale = BitScale(args, channel);
    std::array<std::uint64_t, kPlanes> word;
    for (int p = 0; p < kPlanes; ++p) {
      word[static_cast<std::size_t>(p)] = args.planes[layout::PlaneWord(
          channel, p, args.block, RowBlocks(args, args.segment_blocks))];
    }
    std::array<double, kPlanes> right{};
    double xx = 0, yy = 0;
    for (std::size_t i = 0; i < kBlockTokens; ++i) {
      const float x = args.x[i * dim + j];
      const double y = x - mean;  // rounded to single precision, as Pack computes it
      xx += static_cast<double>(x) * x;
      yy += y * y;
      const auto bits = std::bit_cast<std::uint64_t>(y);
      for (std::size_t p = 0; p < kPlanes; ++p) {
        right[p] += std::bit_cast<double>(bits ^ ((~word[p] >> i) << 63));  // sigma_p y
      }
    }
    c.xx += xx;
    c.yy += yy;
    c.square += scale * scale * kBlockTokens;
    for (std::size_t p = 0; p < kPlanes; ++p) {
      c.right[p] += scale * right[p];
      for (std::size_t q = p + 1; q < kPlanes; ++q) {
        const int differ = std::popcount(word[p] ^ word[q]);
        c.cross[Pair(static_cast<int>(p), static_cast<int>(q))] +=
            scale * scale * (kBlockTokens - 2 * differ);
      }
    }
  }
}

void CodecSums::Merge(const CodecSums& other) {
  assert(channels_.size() == other.channels_.size());
  for (std::size_t j = 0; j < channels_.size(); ++j) {
    Channel& c = channels_[j];
    const Channel& o = other.channels_[j];
    c.xx += o.xx;
    c.yy += o.yy;
    c.square += o.square;
    for (std::size_t p = 0; p < c.right.size(); ++p) c.right[p] += o.right[p];
    for (std::size_t p = 0; p < c.cross.size(); ++p) c.cross[p] += o.cross[p];
  }
}

double CodecSums::Gram(const Channel& c, int p, int q) {
  if (p == q) return c.square;
  return c.cross[Pair(std::min(p, q), std::max(p, q))];
}

std::vector<float> CodecSums::FitWeights() const {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, 0, kPlanes, kPlanes>;
  using Vector = Eigen::Matrix<double, Eigen::Dynamic, 1, 0, kPlanes, 1>;
  std::vector<float> weight(channels_.size() * kPlanes * kPlanes);
  float* out = weight.data();
  for (const Channel& c : channels_) {
    for (int t = 1; t <= kPlanes; ++t, out += kPlanes) {
      Matrix gram(t, t);
      Vector right(t);
      for (int p = 0; p < t; ++p) {
        right[p] = c.right[static_cast<std::size_t>(p)];
        for (int q = 0; q < t; ++q) gram(p, q) = Gram(c, p, q);
      }
      gram.diagonal().array() += kRidge * Gram(c, 0, 0);
      const Vector w = gram.ldlt().solve(right);
      for (int p = 0; p < t; ++p) out[p] = static_cast<float>(w[p]);
    }
  }
  return weight;
}

std::vector<double> CodecSums::Errors(const std::vector<float>& weight) const {
  assert(weight.size() == channels_.size() * kPlanes * kPlanes);
  const std::size_t dim = channels_.size();
  std::vector<double> errors(kLevels * dim);
  for (std::size_t j = 0; j < dim; ++j) {
    const Channel& c = channels_[j];
    errors[j] = c.xx;
    errors[dim + j] = c.yy;
    for (int t = 1; t <= kPlanes; ++t) {
      const float* w = weight.data() + (j * kPlanes + Size(t) - 1) * kPlanes;
      double gain = 0;  // 2 w.r - w'Gw
      for (int p = 0; p < t; ++p) {
        double gw = 0;
        for (int q = 0; q < t; ++q) gw += Gram(c, p, q) * w[q];
        gain += w[p] * (2.0 * c.right[Size(p)] - gw);
      }
      // Exact decoding leaves a rounding error of either sign. NaN stays NaN: such a channel is
      // never planned.
      const double error = c.yy - gain;
      errors[(Size(t) + 1) * dim + j] = error < 0 ? 0.0 : error;
    }
  }
  return errors;
}

std::vector<float> CentreWeights(const std::vector<float>& ranges) {
  std::vector<float> weight(ranges.size() * kPlanes * kPlanes);
  float* out = weight.data();
  for (const float range : ranges) {
    for (int t = 1; t <= kPlanes; ++t, out += kPlanes) {
      for (int p = 0; p < t; ++p) out[p] = std::ldexp(range, -(p + 1));
    }
  }
  return weight;
}

MeanCodec FitSteps(BlockReader& reader, std::int64_t first, std::int64_t n_blocks,
                   const IndexShape& shape, Ranges ranges, double mean_reach) {
  assert(n_blocks > 0);
  const int limit = layout::MeanLimit(shape.mean_bits);
  MeanCodec codec;
  codec.mean_step = FitMeanSteps(reader, first, n_blocks, shape.head_dim, limit, mean_reach);
  const std::vector<double> rms = ResidualRms(reader, first, n_blocks, limit, codec.mean_step);
  std::vector<float> multiple(rms.size(), 2.0F);
  if (ranges == Ranges::kMeasured) {
    multiple = FitRangeMultiples(reader, first, n_blocks, limit, codec.mean_step,
                                 std::vector<float>(rms.begin(), rms.end()));
  }
  for (std::size_t j = 0; j < rms.size(); ++j) {
    codec.range.push_back(ToStep(static_cast<double>(multiple[j]) * rms[j]));
  }
  return codec;
}

MeanCodec FitCodec(BlockReader& reader, std::int64_t first, std::int64_t n_blocks,
                   const IndexShape& shape, const IndexRules& rules, double mean_reach,
                   const Backend& backend) {
  MeanCodec codec = FitSteps(reader, first, n_blocks, shape, rules.ranges, mean_reach);
  if (rules.decoders == Decoders::kCentre) {
    codec.weight = CentreWeights(codec.range);
    return codec;
  }
  constexpr std::int32_t kScratchBlocks = 2;  // the smallest segment; only its first block is used
  const std::size_t plane_bytes = layout::PlaneBytes(shape.head_dim, kScratchBlocks);
  AlignedBuffer scratch(plane_bytes + layout::SideBytes(Codec::kMean, shape.head_dim,
                                                        shape.mean_bits, kScratchBlocks));
  CodecSums sums(shape.head_dim);
  for (std::int64_t b = first; b < first + n_blocks; ++b) {
    const PackArgs args = {.codec = Codec::kMean,
                           .head_dim = shape.head_dim,
                           .segment_blocks = kScratchBlocks,
                           .mean_bits = shape.mean_bits,
                           .block = 0,
                           .x = reader.Load(b),
                           .mean_step = codec.mean_step.data(),
                           .range = codec.range.data(),
                           .planes = scratch.as<std::uint64_t>(),
                           .side = scratch.as<std::uint8_t>(plane_bytes)};
    backend.Pack(args);
    sums.AddBlock(args);
  }
  codec.weight = sums.FitWeights();
  return codec;
}

void CodecSums::Save(StateWriter* out) const { out->PutAll(channels_); }

void CodecSums::Load(StateReader* in, std::int32_t head_dim) {
  channels_ = in->GetAll<Channel>(static_cast<std::size_t>(head_dim));
}

}  // namespace fathom
