// SPDX-License-Identifier: MIT
#include <Eigen/Cholesky>
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

#include "fathom/error.h"
#include "fathom/stats.h"

namespace fathom {
namespace {

// How far an estimate from few and correlated samples is trusted beyond its diagonal.
struct Shrinkage {
  double towards_diagonal;
  double identity;  // part of the mean diagonal added to the diagonal
};
constexpr Shrinkage kKeys = {0.2, 1e-4};
constexpr Shrinkage kQueries = {0.5, 1e-3};

// matrix: symmetric [dim][dim], so that its storage order does not matter.
Eigen::MatrixXd Shrunk(const std::vector<double>& matrix, Eigen::Index dim, Shrinkage by) {
  const Eigen::Map<const Eigen::MatrixXd> m(matrix.data(), dim, dim);
  const double floor = by.identity * m.diagonal().mean();
  Eigen::MatrixXd shrunk = (1.0 - by.towards_diagonal) * m;
  shrunk.diagonal().array() = m.diagonal().array() + floor;
  return shrunk;
}

[[noreturn]] void Refuse(const Moments& keys, const std::string& why) {
  throw Error(ErrorCode::kUsage, "the keys of " + std::to_string(keys.count()) +
                                     " tokens have no balanced basis: " + why + "; use basis=raw");
}

// [dim][dim] floats by row; inf where single precision does not reach.
std::vector<float> ToFloats(const Eigen::MatrixXd& m) {
  std::vector<float> out;
  out.reserve(static_cast<std::size_t>(m.size()));
  for (Eigen::Index i = 0; i < m.rows(); ++i) {
    for (Eigen::Index j = 0; j < m.cols(); ++j) out.push_back(static_cast<float>(m(i, j)));
  }
  return out;
}

bool AllFinite(const std::vector<float>& v) {
  return std::ranges::all_of(v, [](float x) { return std::isfinite(x); });
}

}  // namespace

Basis BalancedBasis(const Moments& keys, const SecondMoment& queries) {
  const Eigen::Index dim = keys.dim();
  const Eigen::MatrixXd c_k = Shrunk(keys.Covariance(), dim, kKeys);
  if (!c_k.allFinite()) Refuse(keys, "NaN or inf among them");
  const Eigen::LLT<Eigen::MatrixXd> cholesky(c_k);
  if (cholesky.info() != Eigen::Success) {
    Refuse(keys, "their covariance is not positive definite (all the same?)");
  }
  const Eigen::MatrixXd l = cholesky.matrixL();
  Eigen::MatrixXd product;  // L^T C_q L
  if (queries.count() > 0) {
    product = l.transpose() * Shrunk(queries.Matrix(), dim, kQueries) * l;
  } else {
    product = l.transpose() * l;
  }
  Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver;
  if (!product.allFinite() || solver.compute(product).info() != Eigen::Success) {
    Refuse(keys, "NaN or inf among the queries");
  }
  const Eigen::MatrixXd u = solver.eigenvectors().rowwise().reverse();  // S descending
  Eigen::MatrixXd query_map = l * u;
  Eigen::MatrixXd key_map = cholesky.matrixU().solve(u);  // L^-T U
  for (Eigen::Index j = 0; j < dim; ++j) {
    Eigen::Index largest = 0;
    query_map.col(j).cwiseAbs().maxCoeff(&largest);
    if (query_map(largest, j) < 0) {
      query_map.col(j) *= -1.0;
      key_map.col(j) *= -1.0;
    }
  }
  Basis basis = RawBasis(keys.dim(), keys.mean());
  basis.key_map = ToFloats(key_map);
  basis.query_map = ToFloats(query_map);
  if (!AllFinite(basis.key_map) || !AllFinite(basis.query_map)) {
    Refuse(keys, "they are too large or too small for single precision");
  }
  return basis;
}

}  // namespace fathom
