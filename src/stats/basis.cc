// SPDX-License-Identifier: MIT
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <string>

#include "base/cpu_features.h"
#include "fathom/error.h"
#include "fathom/stats.h"
#include "fathom/types.h"
#include "memory/state_stream.h"

namespace fathom {
namespace {

// Lets R rows share each read of the map and keeps R x V vector sums in registers.
template <typename VectorType, int R, int V>
struct MapShape {
  using Vector = VectorType;
  static constexpr int kRows = R;
  static constexpr int kVectors = V;
  static constexpr std::int32_t kColumns =
      V * static_cast<std::int32_t>(sizeof(Vector) / sizeof(float));
};
using Vector4 [[gnu::vector_size(16)]] = float;
using PortableShape = MapShape<Vector4, 2, 4>;
constexpr std::int64_t kGroup = 8;  // rows centred at a time, a multiple of every shape's

// The functions below: out[r][c] = sum_i x[r][i] * map[i][c]. Every sum runs over i in ascending
// order in single precision, without fused multiply-add: a coordinate depends on its own row alone,
// not on the number of rows, threads or the width of a vector register, so a key that is packed
// again gives the same bits.

// S::kColumns columns of R rows. Copies go one vector at a time: that is what compilers turn into
// plain loads and stores.
template <typename S, int R>
[[gnu::always_inline]] inline void MapTile(const float* x, const float* map, std::int32_t dim,
                                           float* out) {
  using Vector = typename S::Vector;
  constexpr std::size_t kLanes = sizeof(Vector) / sizeof(float);
  Vector sum[R][S::kVectors] = {};
  for (std::int32_t i = 0; i < dim; ++i, map += dim) {
#pragma GCC unroll 8
    for (std::size_t v = 0; v < S::kVectors; ++v) {
      Vector row;
      std::memcpy(&row, map + v * kLanes, sizeof row);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][v] += x[r * dim + i] * row;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r, out += dim) {
#pragma GCC unroll 8
    for (std::size_t v = 0; v < S::kVectors; ++v) {
      std::memcpy(out + v * kLanes, &sum[r][v], sizeof(Vector));
    }
  }
}

// One row and the columns that do not fill a tile.
inline void MapRest(const float* x, const float* map, std::int32_t dim, std::int32_t columns,
                    float* out) {
  std::fill_n(out, columns, 0.0f);
  for (std::int32_t i = 0; i < dim; ++i) {
    const float* row = map + static_cast<std::ptrdiff_t>(i) * dim;
    for (std::int32_t c = 0; c < columns; ++c) out[c] += x[i] * row[c];
  }
}

template <typename S, int R>
[[gnu::always_inline]] inline void MapGroup(const float* x, const float* map, std::int32_t dim,
                                            float* out) {
  std::int32_t j = 0;
  for (; j + S::kColumns <= dim; j += S::kColumns) MapTile<S, R>(x, map + j, dim, out + j);
  if (j == dim) return;
  for (int r = 0; r < R; ++r) MapRest(x + r * dim, map + j, dim, dim - j, out + r * dim + j);
}

template <typename S>
[[gnu::always_inline]] inline void MapAll(const float* x, std::int64_t n, const float* map,
                                          std::int32_t dim, float* out) {
  std::int64_t i = 0;
  for (; i + S::kRows <= n; i += S::kRows) {
    MapGroup<S, S::kRows>(x + i * dim, map, dim, out + i * dim);
  }
  for (; i < n; ++i) MapGroup<S, 1>(x + i * dim, map, dim, out + i * dim);
}

#if defined(__x86_64__)
using Vector8 [[gnu::vector_size(32)]] = float;
using Avx2Shape = MapShape<Vector8, 4, 2>;

[[gnu::target("avx2")]] void MapAllAvx2(const float* x, std::int64_t n, const float* map,
                                        std::int32_t dim, float* out) {
  MapAll<Avx2Shape>(x, n, map, dim, out);
}
#endif

// out = x * map. x, out: [n][dim].
void MapRows(const float* x, std::int64_t n, const float* map, std::int32_t dim, float* out) {
#if defined(__x86_64__)
  if (GetCpuFeatures().avx2) return MapAllAvx2(x, n, map, dim, out);
#endif
  MapAll<PortableShape>(x, n, map, dim, out);
}

// Columns by falling E[(qV)_j^2] * lambda_j, or by falling lambda without queries; equals keep
// their order.
std::vector<Eigen::Index> ColumnOrder(const Eigen::VectorXd& lambda, const Eigen::MatrixXd& v,
                                      const SecondMoment& queries) {
  Eigen::VectorXd energy = lambda.cwiseMax(0.0);
  if (queries.count() > 0) {
    const std::vector<double> moment =
        queries.Matrix();  // symmetric: storage order does not matter
    const Eigen::Map<const Eigen::MatrixXd> m(moment.data(), v.rows(), v.rows());
    energy.array() *= (v.transpose() * m * v).diagonal().array();
  }
  std::vector<Eigen::Index> order(static_cast<std::size_t>(v.cols()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](Eigen::Index a, Eigen::Index b) { return energy[a] > energy[b]; });
  return order;
}

}  // namespace

void Basis::MapKeys(const float* in, std::int64_t n, float* out) const {
  const auto subtract = [&](std::int64_t rows, float* to) {
    for (std::int64_t i = 0; i < rows; ++i, in += dim, to += dim) {
      for (std::int32_t j = 0; j < dim; ++j) to[j] = in[j] - center[static_cast<std::size_t>(j)];
    }
  };
  if (is_identity()) return subtract(n, out);
  std::array<float, kGroup * kMaxHeadDim> centred;
  assert(dim <= kMaxHeadDim);
  for (std::int64_t first = 0; first < n; first += kGroup) {
    const std::int64_t rows = std::min<std::int64_t>(kGroup, n - first);
    subtract(rows, centred.data());
    MapRows(centred.data(), rows, key_map.data(), dim, out + first * dim);
  }
}

void Basis::MapQueries(const float* in, std::int64_t n, float* out) const {
  if (query_map.empty()) {
    std::copy_n(in, n * dim, out);
  } else {
    MapRows(in, n, query_map.data(), dim, out);
  }
}

Basis RawBasis(std::int32_t dim, std::span<const double> center) {
  assert(center.empty() || center.size() == static_cast<std::size_t>(dim));
  Basis basis;
  basis.dim = dim;
  basis.center.assign(static_cast<std::size_t>(dim), 0.0f);
  std::ranges::transform(center, basis.center.begin(),
                         [](double x) { return static_cast<float>(x); });
  return basis;
}

Basis KltBasis(const Moments& keys, const SecondMoment& queries) {
  const std::int32_t dim = keys.dim();
  assert(keys.count() >= 2);
  const std::vector<double> covariance = keys.Covariance();
  const Eigen::Map<const Eigen::MatrixXd> c(covariance.data(), dim, dim);
  Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver;
  if (!c.allFinite() || solver.compute(c).info() != Eigen::Success) {
    throw Error(ErrorCode::kUsage,
                "the key covariance of " + std::to_string(keys.count()) +
                    " tokens has no eigenvectors (NaN or inf among the keys); use basis=raw");
  }
  Eigen::MatrixXd v = solver.eigenvectors();
  const std::vector<Eigen::Index> order = ColumnOrder(solver.eigenvalues(), v, queries);
  Basis basis = RawBasis(dim, keys.mean());
  const std::size_t d = order.size();
  basis.key_map.resize(d * d);
  for (std::size_t j = 0; j < d; ++j) {
    const auto column = v.col(order[j]);
    Eigen::Index largest = 0;
    column.cwiseAbs().maxCoeff(&largest);
    const double sign = column[largest] < 0 ? -1.0 : 1.0;
    for (std::size_t i = 0; i < d; ++i) {
      basis.key_map[i * d + j] = static_cast<float>(sign * column[static_cast<Eigen::Index>(i)]);
    }
  }
  basis.query_map = basis.key_map;
  return basis;
}

void Basis::Save(StateWriter* out) const {
  out->PutAll(center);
  out->PutAll(key_map);
  out->PutAll(query_map);
}

void Basis::Load(StateReader* in, std::int32_t channels) {
  const auto n = static_cast<std::size_t>(channels);
  dim = channels;
  center = in->GetAll<float>(n);
  key_map = in->GetAll<float>();
  query_map = in->GetAll<float>(key_map.size());
  if (!key_map.empty() && key_map.size() != n * n) in->Fail("a basis is not square");
}

}  // namespace fathom
