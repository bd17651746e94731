// SPDX-License-Identifier: MIT
#include "method/residual.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

#include "backend/rest.h"
#include "base/half.h"
#include "memory/state_stream.h"

namespace fathom {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

ValueMeans::ValueMeans(std::int32_t head_dim, ResidualRule rule)
    : dim_(head_dim), rule_(rule), total_(Size(head_dim)), mean_(Size(head_dim)) {}

void ValueMeans::MoveTo(const Half* rows, std::int64_t n_tokens, std::int64_t skip) {
  assert(n_tokens % kBlockTokens == 0 && skip < kBlockTokens);
  if (n_tokens == n_tokens_) return;
  Truncate(n_tokens);
  const std::size_t dim = Size(dim_);
  std::vector<float> mean(dim);
  std::vector<float> value(dim);
  std::vector<double> sum(dim);
  for (; n_tokens_ < n_tokens; n_tokens_ += kBlockTokens) {
    const std::int64_t counted = n_tokens_ == 0 ? kBlockTokens - skip : kBlockTokens;
    std::ranges::fill(sum, 0.0);
    for (std::int64_t i = kBlockTokens - counted; i < kBlockTokens; ++i) {
      ConvertHalfToFloat(rows + (n_tokens_ + i) * 2 * dim_ + dim_, dim_, value.data());
      for (std::size_t d = 0; d < dim; ++d) sum[d] += value[d];
    }
    for (std::size_t d = 0; d < dim; ++d) total_[d] += sum[d];
    if ((n_tokens_ / kBlockTokens + 1) % kCheckpointBlocks == 0) {
      checkpoint_.insert(checkpoint_.end(), total_.begin(), total_.end());
    }
    if (rule_ != ResidualRule::kBlock) continue;
    for (std::size_t d = 0; d < dim; ++d) {
      mean[d] = static_cast<float>(sum[d] / static_cast<double>(counted));
    }
    block_mean_.resize(block_mean_.size() + dim);
    ConvertFloatToHalf(mean.data(), dim_, block_mean_.data() + block_mean_.size() - dim);
  }
  FindMean(skip);
}

void ValueMeans::FindMean(std::int64_t skip) {
  const auto counted = static_cast<double>(std::max<std::int64_t>(n_tokens_ - skip, 1));
  std::ranges::transform(total_, mean_.begin(),
                         [&](double sum) { return static_cast<float>(sum / counted); });
  is_finite_ = std::ranges::all_of(mean_, [](float x) { return std::isfinite(x); });
}

void ValueMeans::Save(StateWriter* out) const {
  out->Put(n_tokens_);
  out->PutAll(block_mean_);
  out->PutAll(total_);
  out->PutAll(checkpoint_);
  out->PutAll(mean_);
  out->Put<std::uint8_t>(is_finite_ ? 1 : 0);
}

void ValueMeans::Load(StateReader* in) {
  const auto dim = static_cast<std::size_t>(dim_);
  n_tokens_ = in->GetIn<std::int64_t>(0, std::int64_t{1} << 40);
  const std::int64_t halves = Bytes(dim_, rule_, n_tokens_) / std::int64_t{sizeof(Half)};
  block_mean_ = in->GetAll<Half>(static_cast<std::size_t>(halves));
  total_ = in->GetAll<double>(dim);
  checkpoint_ = in->GetAll<double>(
      static_cast<std::size_t>(n_tokens_ / kBlockTokens / kCheckpointBlocks) * dim);
  mean_ = in->GetAll<float>(dim);
  is_finite_ = in->GetIn<std::uint8_t>(0, 1) != 0;
}

void ValueMeans::Truncate(std::int64_t n_tokens) {
  if (n_tokens >= n_tokens_) return;
  const std::int64_t kept = n_tokens / kBlockTokens / kCheckpointBlocks;
  n_tokens_ = kept * kCheckpointBlocks * kBlockTokens;
  checkpoint_.resize(Size(kept) * total_.size());
  if (kept > 0) {
    std::copy(checkpoint_.end() - dim_, checkpoint_.end(), total_.begin());
  } else {
    std::ranges::fill(total_, 0.0);
  }
  if (rule_ == ResidualRule::kBlock) block_mean_.resize(Size(n_tokens_ / kBlockTokens * dim_));
}

void ValueMeans::Clear() {
  Truncate(0);
  FindMean(0);
}

float FitResidualFactor(std::span<const ResidualSample> samples) {
  constexpr int kSteps = 24;
  constexpr double kLargest = 1.2;
  float best_factor = 0;
  double best = std::numeric_limits<double>::infinity();
  for (int step = 0; step <= kSteps; ++step) {
    const double factor = kLargest * step / kSteps;
    double total = 0;
    for (const ResidualSample& s : samples) {
      if (!IsUsableRest(s.mass, s.rest)) continue;  // decode leaves it out whatever the factor
      const double weight = 1.0 / (1.0 + factor * s.mass);
      double error = 0, norm = 0;
      for (std::size_t d = 0; d < s.out.size(); ++d) {
        const double x = (s.out[d] + factor * s.rest[d]) * weight - s.dense[d];
        error += x * x;
        norm += static_cast<double>(s.dense[d]) * s.dense[d];
      }
      if (norm > 0) total += std::sqrt(error / norm);
    }
    // A NaN total is never better; equal ones keep the smaller factor.
    if (total < best) {
      best = total;
      best_factor = static_cast<float>(factor);
    }
  }
  return best_factor;
}

}  // namespace fathom
