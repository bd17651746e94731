// SPDX-License-Identifier: MIT
// Streaming, mergeable moments of keys and queries (design section 3, "Statistics").
//
// Accumulation is in double. Merging accumulators over disjoint tokens gives the moments of their
// union up to rounding, in any order. Not thread-safe: give each thread its own and merge.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fathom {

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

// An exact change of coordinates for scores: q . (k - mu) == (q * query_map) . ((k - mu) *
// key_map).
struct Basis {
  std::int32_t dim = 0;
  std::vector<float> center;  // [dim] mu; zeros where keys are not centred
  std::vector<float>
      key_map;  // [dim][dim], x_j = sum_i (k - mu)_i key_map[i][j]; empty means identity
  std::vector<float> query_map;  // [dim][dim]; empty means identity

  bool is_identity() const { return key_map.empty(); }
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

}  // namespace fathom
