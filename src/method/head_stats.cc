// SPDX-License-Identifier: MIT
#include "method/head_stats.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/half.h"
#include "store/codec_fit.h"

namespace fathom {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Moments of the keys of one KV head, the first 16 tokens left out.
Moments KeyMoments(const Half* rows, std::int64_t n_tokens, std::int32_t dim,
                   bool full_covariance) {
  Moments moments(dim, full_covariance);
  std::vector<float> keys(kBlockTokens * Size(dim));
  for (std::int64_t first = kStatsSkip; first < n_tokens; first += kBlockTokens) {
    const std::int64_t n = std::min<std::int64_t>(kBlockTokens, n_tokens - first);
    for (std::int64_t i = 0; i < n; ++i) {
      ConvertHalfToFloat(rows + (first + i) * 2 * dim, dim, keys.data() + i * dim);
    }
    moments.Add(keys.data(), n);
  }
  return moments;
}

// Var_j = m_j' C m_j of the mapped coordinates.
std::vector<double> MappedVariance(const Basis& basis, const std::vector<double>& covariance) {
  const std::size_t dim = Size(basis.dim);
  std::vector<double> variance(dim);
  std::vector<double> product(dim);
  for (std::size_t a = 0; a < dim; ++a) {
    std::ranges::fill(product, 0.0);
    for (std::size_t b = 0; b < dim; ++b) {
      const double c = covariance[a * dim + b];
      for (std::size_t j = 0; j < dim; ++j) product[j] += c * basis.key_map[b * dim + j];
    }
    for (std::size_t j = 0; j < dim; ++j) variance[j] += product[j] * basis.key_map[a * dim + j];
  }
  for (double& v : variance) v = std::max(v, 0.0);
  return variance;
}

std::vector<double> MeanAbsKeys(const Half* rows, std::int64_t n_blocks, const Basis& basis) {
  std::vector<double> sum(Size(basis.dim));
  BlockReader reader(rows, basis);
  for (std::int64_t b = 0; b < n_blocks; ++b) {
    const float* x = reader.Load(b);
    for (int i = 0; i < kBlockTokens; ++i, x += basis.dim) {
      for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += std::fabs(x[j]);
    }
  }
  for (double& s : sum)
    s /= static_cast<double>(std::max<std::int64_t>(n_blocks, 1)) * kBlockTokens;
  return sum;
}

std::vector<double> MeanAbsQueries(const std::vector<float>& queries, const Basis& basis) {
  std::vector<double> sum(Size(basis.dim));
  const std::size_t n = queries.size() / sum.size();
  if (n == 0) return sum;
  std::vector<float> mapped(queries.size());
  basis.MapQueries(queries.data(), static_cast<std::int64_t>(n), mapped.data());
  for (std::size_t i = 0; i < mapped.size(); ++i) sum[i % sum.size()] += std::fabs(mapped[i]);
  for (double& s : sum) s /= static_cast<double>(n);
  return sum;
}

SecondMoment MomentOf(const std::vector<float>& queries, std::int32_t dim) {
  SecondMoment moment(dim);
  moment.Add(queries.data(), static_cast<std::int64_t>(queries.size()) / dim, dim);
  return moment;
}

}  // namespace

HeadStats MeasureHead(const MethodContext& context, std::int32_t layer, std::int32_t kv_head,
                      std::int64_t n_tokens, BasisRule rule, bool abs) {
  if (context.calibration) return context.calibration->head(layer, kv_head, rule).stats;
  const HeadGeometry& heads = context.rows->geometry();
  const std::int32_t dim = heads.head_dim;
  const Half* rows = context.rows->rows(layer, kv_head);
  const QuerySamples none;
  const QuerySamples& samples = context.queries ? (*context.queries)[Size(layer)].samples : none;
  const bool mapped = rule == BasisRule::kKlt || rule == BasisRule::kBalanced;
  const Moments keys = KeyMoments(rows, n_tokens, dim, mapped);

  HeadStats stats;
  if (rule == BasisRule::kKlt) {
    stats.basis = KltBasis(keys, MomentOf(samples.OfGroup(kv_head, heads.group()), dim));
  } else if (rule == BasisRule::kBalanced) {
    // The second half of the prefill: queries drift, and what comes next is like what came last.
    stats.basis = BalancedBasis(
        keys, MomentOf(samples.OfGroup(kv_head, heads.group(), samples.size() / 2), dim));
  } else {
    stats.basis =
        RawBasis(dim, rule == BasisRule::kCentred ? keys.mean() : std::span<const double>());
  }
  stats.variance = mapped ? MappedVariance(stats.basis, keys.Covariance()) : keys.Variance();
  if (abs) {
    stats.abs_key = MeanAbsKeys(rows, n_tokens / kBlockTokens, stats.basis);
    stats.abs_query = MeanAbsQueries(samples.OfGroup(kv_head, heads.group()), stats.basis);
  }
  return stats;
}

HeadMoments MeasureMoments(const MethodContext& context, std::int32_t layer, std::int32_t kv_head,
                           std::int64_t n_tokens) {
  const HeadGeometry& heads = context.rows->geometry();
  const Moments keys = KeyMoments(context.rows->rows(layer, kv_head), n_tokens, heads.head_dim,
                                  /*full_covariance=*/true);
  const std::vector<double> covariance = keys.Covariance();
  HeadMoments moments;
  moments.key_mean.assign(keys.mean().begin(), keys.mean().end());
  moments.key_covariance.assign(covariance.begin(), covariance.end());
  moments.query_moment.resize(covariance.size());
  if (context.queries != nullptr) {
    const QuerySamples& samples = (*context.queries)[Size(layer)].samples;
    const std::vector<double> matrix =
        MomentOf(samples.OfGroup(kv_head, heads.group()), heads.head_dim).Matrix();
    moments.query_moment.assign(matrix.begin(), matrix.end());
  }
  return moments;
}

const MeanCodec* CalibratedCodec(const MethodContext& context, std::int32_t layer,
                                 std::int32_t kv_head, BasisRule rule, const IndexShape& shape) {
  if (context.calibration == nullptr || shape.codec != Codec::kMean) return nullptr;
  return &context.calibration->head(layer, kv_head, rule).codec[shape.mean_bits == 8 ? 1 : 0];
}

}  // namespace fathom
