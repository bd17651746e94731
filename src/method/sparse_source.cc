// SPDX-License-Identifier: MIT
// What a scanning method gives to decode steps on a device. Any may leave its dense steps to one; a
// step that scans needs what a derived class adds.
#include <algorithm>
#include <cassert>

#include "method/sparse_method.h"

namespace fathom {

StepSource::Rules SparseMethod::rules() const {
  return {config_.k + ExtraKept(), config_.dense_layers, config_.residual};
}

bool SparseMethod::Scans(std::int64_t n_tokens) const {
  return IsSparseAt(n_layers() - 1, n_tokens);
}

std::string SparseMethod::Refusal() const { return "the device has no scan of it"; }

void SparseMethod::CatchUp(std::int64_t n_tokens) {
  max_tokens_ = std::max(max_tokens_, n_tokens);
  for (std::int32_t layer = config_.dense_layers; layer < n_layers(); ++layer) {
    ExtendIndex(layer, n_tokens);
    if (config_.residual != ResidualRule::kOff && fitted_[static_cast<std::size_t>(layer)] == 0) {
      FitResidual(layer, n_tokens);
    }
    if (values_.empty()) continue;
    for (std::int32_t h = 0; h < geometry().n_kv_heads; ++h) {
      Values(layer, h).MoveTo(context_.rows->rows(layer, h), n_tokens / kBlockTokens * kBlockTokens,
                              SkippedValues());
    }
  }
}

StepSource::PlaneHead SparseMethod::plane_head(std::int32_t /*layer*/,
                                               std::int32_t /*kv_head*/) const {
  assert(false);  // Refusal says so
  return {};
}

const ValueMeans& SparseMethod::values(std::int32_t layer, std::int32_t kv_head) const {
  return values_[static_cast<std::size_t>(layer * geometry().n_kv_heads + kv_head)];
}

void SparseMethod::Count(const MethodCounters& step) {
  counters_ += step;
  std::ranges::fill(attended_, -1);
}

}  // namespace fathom
