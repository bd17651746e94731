// SPDX-License-Identifier: MIT
#include <Eigen/Core>
#include <algorithm>
#include <cassert>
#include <cstddef>

#include "fathom/stats.h"

namespace fathom {
namespace {

using RowMatrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowArray = Eigen::Array<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using FloatRows =
    Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>,
               Eigen::Unaligned, Eigen::OuterStride<>>;

constexpr std::int64_t kChunk = 256;  // rows converted to double at a time: 512 KiB at D = 256

std::size_t Size(std::int32_t n) { return static_cast<std::size_t>(n); }

// Fills the lower triangle of a [dim][dim] matrix from its upper one.
void MirrorUpper(double* matrix, std::int32_t dim) {
  Eigen::Map<RowMatrix> m(matrix, dim, dim);
  m.triangularView<Eigen::StrictlyLower>() = m.transpose();
}

}  // namespace

Moments::Moments(std::int32_t dim, bool full_covariance)
    : dim_(dim),
      full_(full_covariance),
      mean_(Size(dim)),
      m2_(full_covariance ? Size(dim) * Size(dim) : Size(dim)) {
  assert(dim > 0);
}

// A chunk's own moments come from two passes over it, so that no large squares are subtracted;
// chunks are then joined by the pairwise rule of Chan, Golub and LeVeque. In the full matrix only
// the upper triangle is kept up to date.
void Moments::Add(const float* x, std::int64_t n) {
  for (std::int64_t first = 0; first < n; first += kChunk) {
    const std::int64_t rows = std::min(kChunk, n - first);
    RowMatrix chunk =
        FloatRows(x + first * dim_, rows, dim_, Eigen::OuterStride<>(dim_)).cast<double>();
    Moments part(dim_, full_);
    part.count_ = rows;
    Eigen::Map<Eigen::RowVectorXd> mean(part.mean_.data(), dim_);
    mean = chunk.colwise().mean();
    chunk.rowwise() -= mean;
    if (full_) {
      Eigen::Map<RowMatrix> m2(part.m2_.data(), dim_, dim_);
      m2.selfadjointView<Eigen::Upper>().rankUpdate(chunk.transpose());
    } else {
      Eigen::Map<Eigen::RowVectorXd>(part.m2_.data(), dim_) = chunk.colwise().squaredNorm();
    }
    Merge(part);
  }
}

void Moments::Merge(const Moments& other) {
  assert(dim_ == other.dim_ && full_ == other.full_);
  if (other.count_ == 0) return;
  const double na = static_cast<double>(count_), nb = static_cast<double>(other.count_);
  const double n = na + nb;
  Eigen::Map<Eigen::VectorXd> mean(mean_.data(), dim_);
  const Eigen::VectorXd delta = Eigen::Map<const Eigen::VectorXd>(other.mean_.data(), dim_) - mean;
  for (std::size_t i = 0; i < m2_.size(); ++i) m2_[i] += other.m2_[i];
  if (full_) {
    Eigen::Map<RowMatrix>(m2_.data(), dim_, dim_)
        .selfadjointView<Eigen::Upper>()
        .rankUpdate(delta, na * nb / n);
  } else {
    Eigen::Map<Eigen::ArrayXd>(m2_.data(), dim_) += delta.array().square() * (na * nb / n);
  }
  mean += delta * (nb / n);
  count_ += other.count_;
}

std::vector<double> Moments::Variance() const {
  std::vector<double> variance(Size(dim_));
  if (count_ < 2) return variance;
  for (std::size_t j = 0; j < variance.size(); ++j) {
    variance[j] = m2_[full_ ? j * (Size(dim_) + 1) : j] / static_cast<double>(count_ - 1);
  }
  return variance;
}

std::vector<double> Moments::Covariance() const {
  assert(full_);
  std::vector<double> covariance(m2_.size());
  if (count_ < 2) return covariance;
  for (std::size_t i = 0; i < m2_.size(); ++i) {
    covariance[i] = m2_[i] / static_cast<double>(count_ - 1);
  }
  MirrorUpper(covariance.data(), dim_);
  return covariance;
}

SecondMoment::SecondMoment(std::int32_t dim) : dim_(dim), sum_(Size(dim) * Size(dim)) {
  assert(dim > 0);
}

void SecondMoment::Add(const float* q, std::int64_t n, std::int64_t stride) {
  Eigen::Map<RowMatrix> sum(sum_.data(), dim_, dim_);
  for (std::int64_t first = 0; first < n; first += kChunk) {
    const std::int64_t rows = std::min(kChunk, n - first);
    const RowMatrix chunk =
        FloatRows(q + first * stride, rows, dim_, Eigen::OuterStride<>(stride)).cast<double>();
    sum.selfadjointView<Eigen::Upper>().rankUpdate(chunk.transpose());
  }
  count_ += n;
}

void SecondMoment::Merge(const SecondMoment& other) {
  assert(dim_ == other.dim_);
  for (std::size_t i = 0; i < sum_.size(); ++i) sum_[i] += other.sum_[i];
  count_ += other.count_;
}

std::vector<double> SecondMoment::Matrix() const {
  std::vector<double> matrix(sum_.size());
  if (count_ == 0) return matrix;
  for (std::size_t i = 0; i < sum_.size(); ++i) matrix[i] = sum_[i] / static_cast<double>(count_);
  MirrorUpper(matrix.data(), dim_);
  return matrix;
}

}  // namespace fathom
