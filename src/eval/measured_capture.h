// SPDX-License-Identifier: MIT
// A capture made ready for measuring: rows, sampled queries, measured queries, and what dense
// attention and the exact ranking give at each measured position.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fathom/capture.h"
#include "fathom/eval.h"
#include "fathom/store.h"

namespace fathom {

// Whether the method has such an option.
bool TakesOption(const std::string& method, const std::string& option);

// Has the capture's model QK-norm: as given, or as captured. Throws Error(kUsage) where neither
// tells and the spec's basis depends on it.
bool HasQkNorm(const CaptureFile& capture, std::optional<bool> given, const MethodSpec& spec);

class MeasuredCapture {
 public:
  // Loads the layers of options.layers. Throws as EvaluateError does.
  MeasuredCapture(const CaptureFile& capture, const ErrorOptions& options);

  const RowStore& rows() const { return rows_; }
  const std::vector<LayerQueries>& queries() const { return queries_; }
  std::int32_t n_layers() const { return static_cast<std::int32_t>(layers_.size()); }
  const std::vector<std::int32_t>& layers() const { return layers_; }
  const HeadGeometry& heads() const { return rows_.geometry(); }
  // Measured positions, ascending; position i of the capture's, of n, is `index()[i]`.
  const std::vector<std::int64_t>& positions() const { return positions_; }
  // True for positions that only fit residual factors (ErrorOptions::fit_on_measured).
  bool fits_only(std::size_t position) const { return fits_only_[position]; }
  std::int64_t built_tokens() const { return built_tokens_; }
  float scale() const;

  // Query of a measured position, [n_heads][D].
  const float* query(std::int32_t layer, std::size_t position) const;

  // Dense attention and thresholds of the exact top-k, computed by MeasureDense.
  void MeasureDense(const Backend& backend, std::span<const std::int64_t> k, int n_threads);
  const float* dense(std::int32_t layer, std::size_t position) const;  // [n_heads][D]
  float dense_lse(std::int32_t layer, std::size_t position, std::int32_t head) const;
  // Scores q.k above it are among the exact best k - 36 candidates. -inf where all candidates are.
  double threshold(std::size_t k_index, std::int32_t layer, std::size_t position,
                   std::int32_t head) const;

 private:
  std::size_t Slot(std::int32_t layer, std::size_t position) const {
    return static_cast<std::size_t>(layer) * positions_.size() + position;
  }
  void LoadQueries(const CaptureFile& capture, const ErrorOptions& options, std::int32_t slot);
  void MeasureSlot(const Backend& backend, std::span<const std::int64_t> k, std::int32_t layer,
                   std::size_t position);

  std::vector<std::int32_t> layers_;
  std::vector<std::int64_t> positions_;
  std::vector<std::size_t> index_;  // of the positions among the capture's
  std::vector<bool> fits_only_;
  std::int64_t built_tokens_ = 0;
  RowStore rows_;
  std::vector<LayerQueries> queries_;
  std::vector<float> measured_;    // [layers][positions][n_heads][D]
  std::vector<float> dense_;       // likewise
  std::vector<float> lse_;         // [layers][positions][n_heads]
  std::vector<double> threshold_;  // [k][layers][positions][n_heads]
};

}  // namespace fathom
