// SPDX-License-Identifier: MIT
// Softmax attention in two passes. The maximum ignores NaN, whose exp spoils the sum anyway; a head
// whose scores are all -inf attends nothing: zeros and lse = -inf.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/ref/ref_backend.h"
#include "base/half.h"

namespace fathom {
namespace {

struct Shape {
  int head_dim;
  float scale;
};

// Scaled scores of the listed rows; tokens null: rows 0 .. n - 1.
std::vector<double> ScoreRows(Shape shape, const Half* rows, const float* q,
                              const std::int64_t* tokens, std::int64_t n) {
  std::vector<double> score(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    const Half* key = rows + (tokens != nullptr ? tokens[i] : i) * 2 * shape.head_dim;
    for (int d = 0; d < shape.head_dim; ++d) {
      score[i] += static_cast<double>(q[d]) * HalfToFloat(key[d]);
    }
    score[i] *= shape.scale;
  }
  return score;
}

// Scores to weights in place; returns the log of the sum of exp. All zeros where that is -inf.
double Softmax(std::vector<double>* score) {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  double top = kNothing;
  for (const double s : *score) top = s > top ? s : top;
  const double shift = top == kNothing ? 0 : top;
  double sum = 0;
  for (double& x : *score) sum += x = std::exp(x - shift);
  if (sum == 0) return kNothing;
  for (double& x : *score) x /= sum;
  return shift + std::log(sum);
}

void AddRow(double weight, const Half* row, std::vector<double>* total) {
  for (std::size_t d = 0; d < total->size(); ++d) (*total)[d] += weight * HalfToFloat(row[d]);
}

void StoreRow(const std::vector<double>& total, float* out) {
  std::transform(total.begin(), total.end(), out, [](double x) { return static_cast<float>(x); });
}

// Attends the listed rows; tokens null: rows 0 .. n - 1.
float AttendRows(Shape shape, const Half* rows, const float* q, const std::int64_t* tokens,
                 std::int64_t n, float* out) {
  std::vector<double> weight = ScoreRows(shape, rows, q, tokens, n);
  const double lse = Softmax(&weight);
  std::vector<double> total(static_cast<std::size_t>(shape.head_dim));
  for (std::int64_t i = 0; i < n && !(std::isinf(lse) && lse < 0); ++i) {
    const std::int64_t token = tokens != nullptr ? tokens[i] : i;
    AddRow(weight[i], rows + (2 * token + 1) * shape.head_dim, &total);
  }
  StoreRow(total, out);
  return static_cast<float>(lse);
}

// Attends the rows listed[i] of head.tokens with values read lazily; marks those that are read.
float AttendLazily(const AttendArgs& a, const AttendHead& head, int h,
                   const std::vector<std::int64_t>& listed, std::vector<char>* read) {
  const std::size_t n = listed.size();
  std::vector<std::int64_t> tokens(n);
  for (std::size_t i = 0; i < n; ++i) tokens[i] = head.tokens[listed[i]];
  const std::vector<double> score =
      ScoreRows({a.head_dim, a.scale}, head.rows, head.q + h * a.head_dim, tokens.data(),
                static_cast<std::int64_t>(n));
  std::vector<double> base;
  for (std::size_t i = 0; i < n; ++i) {
    if (listed[i] < kSinks || listed[i] >= head.n_attended - kWindow) base.push_back(score[i]);
  }
  const double limit = Softmax(&base) + std::log(static_cast<double>(a.least_weight));
  std::vector<double> weight = score;
  const double lse = Softmax(&weight);
  std::vector<double> total(static_cast<std::size_t>(a.head_dim));
  double light = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (score[i] < limit) {
      light += weight[i];
      continue;
    }
    (*read)[static_cast<std::size_t>(listed[i])] = 1;
    AddRow(weight[i], head.rows + (2 * tokens[i] + 1) * a.head_dim, &total);
  }
  for (std::size_t d = 0; d < total.size() && head.mean_value != nullptr; ++d) {
    total[d] += light * head.mean_value[d];
  }
  StoreRow(total, head.out + h * a.head_dim);
  return static_cast<float>(lse);
}

}  // namespace

void RefBackend::Attend(const AttendArgs& a) const {
  std::vector<std::int64_t> listed;
  std::vector<std::int64_t> tokens;
  for (const AttendHead& head : a.heads) {
    const bool lazy = a.least_weight > 0 && head.tokens != nullptr;
    std::vector<char> read(static_cast<std::size_t>(head.n_attended), lazy ? 0 : 1);
    for (int h = 0; h < a.group; ++h) {
      listed.clear();
      tokens.clear();
      for (std::int64_t i = 0; i < head.n_attended; ++i) {
        if (head.tokens != nullptr && (head.mask[i] >> h & 1) == 0) continue;
        listed.push_back(i);
        tokens.push_back(head.tokens != nullptr ? head.tokens[i] : i);
      }
      head.lse[h] = lazy ? AttendLazily(a, head, h, listed, &read)
                         : AttendRows({a.head_dim, a.scale}, head.rows, head.q + h * a.head_dim,
                                      tokens.data(), static_cast<std::int64_t>(tokens.size()),
                                      head.out + h * a.head_dim);
    }
    if (head.n_values != nullptr) *head.n_values = std::count(read.begin(), read.end(), 1);
  }
}

void RefBackend::Weigh(const WeighArgs& a) const {
  std::vector<double> total(static_cast<std::size_t>(a.head_dim));
  for (const WeighHead& head : a.heads) {
    std::vector<char> read(static_cast<std::size_t>(a.n_blocks));
    for (std::int64_t i = 0; head.means != nullptr && i < a.group * a.n_blocks; ++i) {
      if (head.mass[i] > head.least[i / a.n_blocks]) read[i % a.n_blocks] = 1;
    }
    for (int h = 0; h < a.group; ++h) {
      std::fill(total.begin(), total.end(), 0.0);
      double other = 0;
      for (std::int64_t b = 0; b < a.n_blocks; ++b) {
        const double mass = head.mass[h * a.n_blocks + b];
        if (read[b] != 0) {
          AddRow(mass, head.means + b * a.head_dim, &total);
        } else {
          other += mass;
        }
      }
      for (std::size_t d = 0; d < total.size(); ++d) total[d] += other * head.mean[d];
      StoreRow(total, head.out + h * a.head_dim);
    }
    if (head.n_read != nullptr) *head.n_read = std::count(read.begin(), read.end(), 1);
  }
}

void RefBackend::Prefill(const PrefillArgs& a) const {
  const HeadGeometry& g = a.geometry;
  const std::int32_t group = std::max(1, g.group());
  for (std::int64_t t = 0; t < a.n_queries; ++t) {
    for (int h = 0; h < g.n_heads; ++h) {
      const std::int64_t at = (t * g.n_heads + h) * g.head_dim;
      AttendRows({g.head_dim, a.scale}, a.rows[h / group], a.q + at, nullptr, a.first + t + 1,
                 a.out + at);
    }
  }
}

}  // namespace fathom
