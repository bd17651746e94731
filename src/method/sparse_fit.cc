// SPDX-License-Identifier: MIT
// How a scanning method gets the factors of its residual: fixed, known, or fitted on the last
// queries of the prefill.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "fathom/calibration.h"
#include "method/sparse_method.h"

namespace fathom {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

void SparseMethod::SampleResidual(const Step& step, const float* q,
                                  std::vector<std::vector<ResidualSample>>* samples) {
  const std::size_t dim = Size(geometry().head_dim);
  std::vector<float> out(samples->size() * dim), dense(out.size());
  const std::vector<float> none(samples->size(), 0.0F);  // nothing is added
  AttendStep(step, q, none, out.data());
  MethodCounters not_counted;
  AttendDense(context_, step.layer, step.n_tokens, q, dense.data(), &not_counted);
  for (std::size_t h = 0; h < samples->size(); ++h) {
    const auto part = [&](const std::vector<float>& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(h * dim);
      return std::vector<float>(begin, begin + static_cast<std::ptrdiff_t>(dim));
    };
    (*samples)[h].push_back({part(out), part(rest_), rest_mass_[h], part(dense)});
  }
}

// Sets the factors of a layer: fixed, from the calibration, or fitted on the last queries of the
// prefill. While none of those was sparse, factors are 0 and the layer counts as not fitted: a
// session that starts shorter than k may get longer prefills.
void SparseMethod::FitResidual(std::int32_t layer, std::int64_t n_tokens) {
  const std::size_t n_heads = Size(geometry().n_heads);
  const std::size_t first = Size(layer) * n_heads;
  const std::span<float> factor(factor_.data() + first, n_heads);
  const std::vector<float>* known = nullptr;
  if (context_.calibration != nullptr) known = context_.calibration->FindResidual(spec_);
  if (fixed_residual()) {
    std::ranges::fill(factor, 1.0F);
  } else if (known != nullptr) {
    std::copy_n(known->data() + first, n_heads, factor.data());
  } else if (!FitFactors(layer, n_tokens, factor)) {
    return;
  }
  fitted_[Size(layer)] = 1;
  fitted_tokens_ = std::max(fitted_tokens_, n_tokens);
}

// False, and nothing changed, when there is no query to fit on.
bool SparseMethod::FitFactors(std::int32_t layer, std::int64_t n_tokens, std::span<float> factor) {
  if (context_.queries == nullptr) return false;
  const QuerySamples& recent = (*context_.queries)[Size(layer)].recent;
  const auto fits = [&](std::int64_t position) {
    return position < n_tokens && IsSparse(StepAt(layer, position + 1));
  };
  if (std::ranges::none_of(recent.positions(), fits)) return false;
  std::vector<std::vector<ResidualSample>> samples(factor.size());
  for (std::int64_t i = 0; i < recent.size(); ++i) {
    const std::int64_t position = recent.positions()[Size(i)];
    if (fits(position)) SampleResidual(StepAt(layer, position + 1), recent.query(i), &samples);
  }
  std::ranges::transform(samples, factor.begin(),
                         [](const auto& of_head) { return FitResidualFactor(of_head); });
  return true;
}

}  // namespace fathom
