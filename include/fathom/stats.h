// SPDX-License-Identifier: MIT
// Statistics of keys and queries (design section 3, "Statistics") and the bases made of them.
//
// Moments are streaming and mergeable.
// Accumulation is in double. Merging accumulators over disjoint tokens gives the moments of their
// union up to rounding, in any order. Not thread-safe: give each thread its own and merge.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fathom {

class StateReader;
class StateWriter;

// Mean and, per channel or in full, the second central moments of vectors of one length.
class Moments {
 public:
  // full_covariance: keep the D x D matrix, not only its diagonal.
  explicit Moments(std::int32_t dim, bool full_covariance = false);

  // x: [n][dim].
  void Add(const float* x, std::int64_t n);
  void Merge(const Moments& other);

  std::int64_t count() const { return count_; }
  std::int32_t dim() const { return dim_; }
  std::span<const double> mean() const { return mean_; }
  // Unbiased variances [dim]; zeros when count < 2.
  std::vector<double> Variance() const;
  // Unbiased covariance [dim][dim]. Requires full_covariance.
  std::vector<double> Covariance() const;

 private:
  std::int32_t dim_;
  bool full_;
  std::int64_t count_ = 0;
  std::vector<double> mean_;  // [dim]
  std::vector<double> m2_;    // [dim] or [dim][dim], sums of products of deviations
};

// E[q q^T] of the queries of one KV head (all heads of its group), not centred.
class SecondMoment {
 public:
  explicit SecondMoment(std::int32_t dim);
  // q: [n][dim], rows `stride` floats apart.
  void Add(const float* q, std::int64_t n, std::int64_t stride);
  void Merge(const SecondMoment& other);
  std::int64_t count() const { return count_; }
  // [dim][dim]; zeros when count is 0.
  std::vector<double> Matrix() const;

 private:
  std::int32_t dim_;
  std::int64_t count_ = 0;
  std::vector<double> sum_;
};

// Queries of one layer, sampled in order of position; every sample holds all heads of its position.
// Not thread-safe.
class QuerySamples {
 public:
  QuerySamples() = default;
  QuerySamples(std::int32_t n_heads, std::int32_t head_dim);

  // position: larger than the last one added. q: [n_heads][D], copied.
  void Add(std::int64_t position, const float* q);
  void KeepEverySecond();                // thins: samples 0, 2, 4, ... stay
  void KeepLast(std::int64_t n);         // n >= 0; all stay where there are no more
  void DropFrom(std::int64_t position);  // forgets samples at `position` and later
  void Clear();

  void Save(StateWriter* out) const;
  // Throws Error(kCorrupt) unless it is of samples of the same heads.
  void Load(StateReader* in);

  std::int64_t size() const { return static_cast<std::int64_t>(positions_.size()); }
  std::span<const std::int64_t> positions() const { return positions_; }
  // [n_heads][D], valid until samples are added or dropped.
  const float* query(std::int64_t sample) const {
    return queries_.data() + static_cast<std::size_t>(sample) * sample_floats();
  }
  std::int32_t n_heads() const { return n_heads_; }
  std::int32_t head_dim() const { return head_dim_; }
  // The queries of heads kv_head * group ... + group - 1, from sample `first` on:
  // [(size - first) * group][D], heads of one sample together. 0 <= first <= size.
  std::vector<float> OfGroup(std::int32_t kv_head, std::int32_t group,
                             std::int64_t first = 0) const;

 private:
  std::size_t sample_floats() const {
    return static_cast<std::size_t>(n_heads_) * static_cast<std::size_t>(head_dim_);
  }

  std::int32_t n_heads_ = 0, head_dim_ = 0;
  std::vector<std::int64_t> positions_;  // ascending
  std::vector<float> queries_;           // [size][n_heads][D]
};

// Queries a session keeps of one layer's prefill.
struct LayerQueries {
  QuerySamples samples;  // evenly over the prefill: statistics
  QuerySamples recent;   // a handful near its end: fits the residual's factors
};

// An exact change of coordinates for scores: q . (k - mu) == (q * query_map) . ((k - mu) *
// key_map).
struct Basis {
  std::int32_t dim = 0;
  std::vector<float> center;  // [dim] mu; zeros where keys are not centred
  std::vector<float>
      key_map;  // [dim][dim], x_j = sum_i (k - mu)_i key_map[i][j]; empty means identity
  std::vector<float> query_map;  // [dim][dim]; empty means identity

  bool is_identity() const { return key_map.empty(); }
  void Save(StateWriter* out) const;
  // Throws Error(kCorrupt) unless it has `channels` of them.
  void Load(StateReader* in, std::int32_t channels);
  // in, out: [n][dim], may not overlap.
  void MapKeys(const float* in, std::int64_t n, float* out) const;
  void MapQueries(const float* in, std::int64_t n, float* out) const;
};

// Identity; centre may be empty (zeros).
Basis RawBasis(std::int32_t dim, std::span<const double> center);

// Eigenvectors V of the key covariance, ordered by E[(qV)_j^2] * lambda_j, largest first (design
// section 3, basis rule). keys: with full covariance and count >= 2. queries: may be empty (count
// 0), then the order is by lambda alone. The sign of each eigenvector is fixed so that its largest
// entry is positive: the basis depends on the data alone.
Basis KltBasis(const Moments& keys, const SecondMoment& queries);

// Balanced basis (design 3.1 point 4). KltBasis diagonalises the keys only; this one makes the
// energy that each channel has in the scores, key variance times query energy, as uneven as a
// linear map can. With C_k the covariance of the keys and C_q the second moment of the queries,
// both shrunk (by 0.2 and 0.5 towards their diagonals, plus 1e-4 and 1e-3 of the mean diagonal), L
// = chol(C_k) and L^T C_q L = U S U^T, S descending:
//   x = U^T L^-1 (k - mu), q~ = U^T L^T q, so that q~ . x = q . (k - mu).
// Under C_k and C_q every x_j has variance 1 and q~_j the mean square S_j.
// keys: with full covariance. queries: of the second half of the prefill, since old ones mislead;
// may be empty (count 0), then C_q is the identity and the basis is KLT of the shrunk covariance
// with the keys scaled to variance 1. The sign of each channel is fixed so that the largest entry
// of its column of query_map is positive: the basis depends on the data alone. Throws Error(kUsage)
// when C_k is not positive definite, as for constant keys or a single token, or when there are NaN
// or inf among the keys or queries.
Basis BalancedBasis(const Moments& keys, const SecondMoment& queries);

}  // namespace fathom
