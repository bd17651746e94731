// SPDX-License-Identifier: MIT
// Chooses how far the planes of a channel reach (Ranges::kMeasured). A histogram of the residual in
// sixteenths of its rms holds all that is needed: every candidate's cells are whole bins, so the
// distortions of its decoders follow without another pass over the keys.
#include <Eigen/Cholesky>
#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/codec_fit.h"

namespace fathom {
namespace {

constexpr std::array kMultiples = {2, 3, 4, 6, 8, 11};  // of the rms
constexpr int kBinsPerRms = 16;                         // a cell of multiple c is 2 c bins
constexpr int kReach = 16;                              // rms; the rest falls into the last bins
constexpr int kHalf = kBinsPerRms * kReach;
constexpr std::int64_t kMostBlocks = 256;

struct Bin {
  double count = 0;
  double sum = 0;  // of the residual, in units of the rms
};

struct Histogram {
  std::array<Bin, 2 * kHalf> bin{};
  double square = 0;

  void Add(float z) {
    // NaN and values far out go to the ends; the sums are of what was there.
    const float at = std::floor(z * kBinsPerRms);
    const int i = at >= kHalf ? kHalf - 1 : at >= -kHalf ? static_cast<int>(at) : -kHalf;
    bin[static_cast<std::size_t>(i + kHalf)].count += 1;
    bin[static_cast<std::size_t>(i + kHalf)].sum += z;
    square += static_cast<double>(z) * z;
  }
};

// Sum over 2, 3 and 4 planes of the logarithm of the least-squares decoders' squared error.
double LogDistortion(const Histogram& h, int multiple) {
  constexpr int kCodes = 1 << kPlanes;
  std::array<Bin, kCodes> cell{};
  const int width = 2 * multiple;  // bins of a cell
  for (int i = -kHalf; i < kHalf; ++i) {
    const int below = i >= 0 ? i / width : (i - width + 1) / width;  // floor
    const int code = std::clamp(below, -kCodes / 2, kCodes / 2 - 1) + kCodes / 2;
    const Bin& bin = h.bin[static_cast<std::size_t>(i + kHalf)];
    cell[static_cast<std::size_t>(code)].count += bin.count;
    cell[static_cast<std::size_t>(code)].sum += bin.sum;
  }
  Eigen::Matrix4d gram = Eigen::Matrix4d::Zero();
  Eigen::Vector4d right = Eigen::Vector4d::Zero();
  for (int code = 0; code < kCodes; ++code) {
    Eigen::Vector4d sigma;
    for (int p = 0; p < kPlanes; ++p) sigma[p] = (code >> (kPlanes - 1 - p) & 1) != 0 ? 1 : -1;
    gram += cell[static_cast<std::size_t>(code)].count * sigma * sigma.transpose();
    right += cell[static_cast<std::size_t>(code)].sum * sigma;
  }
  constexpr double kRidge = 1e-6;  // as the decoders' own
  gram.diagonal() *= 1 + kRidge;
  double total = 0;
  for (int t = 2; t <= kPlanes; ++t) {
    const Eigen::MatrixXd g = gram.topLeftCorner(t, t);
    const Eigen::VectorXd r = right.head(t);
    const double left = h.square - r.dot(g.ldlt().solve(r));
    total += std::log(std::max(left, 1e-12 * h.square));
  }
  return total;
}

float BestMultiple(const Histogram& h) {
  int best = kMultiples.front();
  if (!(h.square > 0) || !std::isfinite(h.square)) return static_cast<float>(best);
  double least = LogDistortion(h, best);
  for (std::size_t i = 1; i < kMultiples.size(); ++i) {
    const double distortion = LogDistortion(h, kMultiples[i]);
    if (distortion < least) {
      least = distortion;
      best = kMultiples[i];
    }
  }
  return static_cast<float>(best);
}

}  // namespace

std::vector<float> FitRangeMultiples(BlockReader& reader, std::int64_t first, std::int64_t n_blocks,
                                     int mean_limit, const std::vector<float>& mean_step,
                                     const std::vector<float>& rms) {
  const std::size_t dim = rms.size();
  std::vector<Histogram> histogram(dim);
  std::vector<float> mean(dim), scale(dim);
  for (std::size_t j = 0; j < dim; ++j) scale[j] = rms[j] > 0 ? 1.0F / rms[j] : 0.0F;
  const std::int64_t stride = (n_blocks + kMostBlocks - 1) / kMostBlocks;
  for (std::int64_t b = first; b < first + n_blocks; b += stride) {
    const float* x = reader.Load(b);
    QuantizedBlockMeans(x, mean_limit, mean_step, mean.data());
    for (std::size_t i = 0; i < kBlockTokens; ++i, x += dim) {
      for (std::size_t j = 0; j < dim; ++j) histogram[j].Add((x[j] - mean[j]) * scale[j]);
    }
  }
  std::vector<float> multiple(dim);
  std::ranges::transform(histogram, multiple.begin(), BestMultiple);
  return multiple;
}

}  // namespace fathom
