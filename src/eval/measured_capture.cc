// SPDX-License-Identifier: MIT
#include "eval/measured_capture.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "base/parallel.h"
#include "eval/capture_rows.h"
#include "fathom/error.h"

namespace fathom {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

[[noreturn]] void Fail(const std::string& message) { throw Error(ErrorCode::kUsage, message); }

std::vector<std::int32_t> ChosenLayers(const CaptureFile& capture, const ErrorOptions& options) {
  const std::vector<std::int32_t>& held = capture.geometry().layers;
  if (options.layers.empty()) return held;
  for (const std::int32_t layer : options.layers) {
    if (std::ranges::find(held, layer) != held.end()) continue;
    std::string list;
    for (const std::int32_t h : held) list += (list.empty() ? "" : ", ") + std::to_string(h);
    Fail("layer " + std::to_string(layer) + " is not in capture '" + capture.path() +
         "'; it holds " + list);
  }
  return options.layers;
}

std::int64_t FrozenTokens(const ErrorOptions& options, std::int64_t n_tokens,
                          std::int64_t first_measured) {
  if (options.fit_on_measured) return n_tokens;
  if (options.freeze == 0) return first_measured;
  if (!(options.freeze > 0 && options.freeze <= 1)) {
    Fail("freeze is " + std::to_string(options.freeze) + "; it must be in (0, 1]");
  }
  return std::min(static_cast<std::int64_t>(options.freeze * static_cast<double>(n_tokens)),
                  first_measured);
}

}  // namespace

bool TakesOption(const std::string& method, const std::string& option) {
  for (const MethodInfo& info : ListMethods()) {
    if (info.name == method)
      return (" " + info.options).find(" " + option + "=") != std::string::npos;
  }
  return false;
}

bool HasQkNorm(const CaptureFile& capture, std::optional<bool> given, const MethodSpec& spec) {
  if (given) return *given;
  if (capture.geometry().has_qk_norm) return *capture.geometry().has_qk_norm;
  const auto preset = spec.options.find("preset");
  const auto basis = spec.options.find("basis");
  const bool is_auto = preset != spec.options.end() && preset->second == "paper" &&
                       (basis == spec.options.end() || basis->second == "auto");
  if (!is_auto) return false;
  throw Error(ErrorCode::kUsage, "capture '" + capture.path() +
                                     "' does not say whether its model has QK-norm, which decides "
                                     "the basis of " +
                                     spec.ToString() +
                                     "; say so (--qk-norm yes|no) or give basis=");
}

MeasuredCapture::MeasuredCapture(const CaptureFile& capture, const ErrorOptions& options)
    : layers_(ChosenLayers(capture, options)),
      rows_(static_cast<std::int32_t>(layers_.size()), capture.geometry().heads,
            capture.geometry().n_tokens) {
  const CaptureGeometry& geometry = capture.geometry();
  if (options.every < 1)
    Fail("every is " + std::to_string(options.every) + "; it must be 1 or more");
  const std::size_t n = geometry.q_positions.size();
  for (std::size_t i = 0; i < n; i += Size(options.every)) {
    index_.push_back(i);
    positions_.push_back(geometry.q_positions[i]);
    fits_only_.push_back(options.fit_on_measured && i < n / 2);
  }
  built_tokens_ = FrozenTokens(options, geometry.n_tokens, positions_.front());
  if (built_tokens_ < kBlockTokens) {
    Fail("statistics would see " + std::to_string(built_tokens_) +
         " tokens; at least 64 are needed before the first measured position, so capture more "
         "tokens, or fewer positions");
  }
  measured_.resize(Size(n_layers()) * positions_.size() * Size(heads().n_heads) *
                   Size(heads().head_dim));
  for (std::int32_t slot = 0; slot < n_layers(); ++slot) {
    LoadCaptureRows(capture, layers_[Size(slot)], geometry.n_tokens, slot, &rows_);
    LoadQueries(capture, options, slot);
  }
  rows_.Commit(geometry.n_tokens);
}

void MeasuredCapture::LoadQueries(const CaptureFile& capture, const ErrorOptions& options,
                                  std::int32_t slot) {
  const std::size_t width = Size(heads().n_heads) * Size(heads().head_dim);
  // Without 1/sqrt(D): the same as queries that are sqrt(D) times as long.
  const float factor = options.unscaled ? std::sqrt(static_cast<float>(heads().head_dim)) : 1.0F;
  std::vector<float> q = capture.LoadQueries(layers_[Size(slot)]);
  for (float& x : q) x *= factor;
  LayerQueries kept = LoadCaptureSamples(capture, layers_[Size(slot)], built_tokens_, factor);
  if (options.fit_on_measured) kept.recent.Clear();
  for (std::size_t p = 0; p < positions_.size(); ++p) {
    const float* from = q.data() + index_[p] * width;
    std::copy_n(from, width, measured_.data() + Slot(slot, p) * width);
    if (fits_only_[p]) kept.recent.Add(positions_[p], from);
  }
  queries_.push_back(std::move(kept));
}

float MeasuredCapture::scale() const {
  return 1.0F / std::sqrt(static_cast<float>(heads().head_dim));
}

const float* MeasuredCapture::query(std::int32_t layer, std::size_t position) const {
  return measured_.data() + Slot(layer, position) * Size(heads().n_heads) * Size(heads().head_dim);
}

const float* MeasuredCapture::dense(std::int32_t layer, std::size_t position) const {
  return dense_.data() + Slot(layer, position) * Size(heads().n_heads) * Size(heads().head_dim);
}

float MeasuredCapture::dense_lse(std::int32_t layer, std::size_t position,
                                 std::int32_t head) const {
  return lse_[Slot(layer, position) * Size(heads().n_heads) + Size(head)];
}

double MeasuredCapture::threshold(std::size_t k_index, std::int32_t layer, std::size_t position,
                                  std::int32_t head) const {
  const std::size_t slots = Size(n_layers()) * positions_.size();
  return threshold_[(k_index * slots + Slot(layer, position)) * Size(heads().n_heads) + Size(head)];
}

void MeasuredCapture::MeasureDense(const Backend& backend, std::span<const std::int64_t> k,
                                   int n_threads) {
  const std::size_t slots = Size(n_layers()) * positions_.size();
  dense_.resize(measured_.size());
  lse_.resize(slots * Size(heads().n_heads));
  threshold_.resize(k.size() * lse_.size());
  ParallelFor(static_cast<std::int64_t>(slots), n_threads, [&](std::int64_t slot) {
    MeasureSlot(backend, k, static_cast<std::int32_t>(Size(slot) / positions_.size()),
                Size(slot) % positions_.size());
  });
}

// The threshold lies between the last token that is chosen and the first that is not.
void MeasuredCapture::MeasureSlot(const Backend& backend, std::span<const std::int64_t> k,
                                  std::int32_t layer, std::size_t position) {
  const std::int64_t n_tokens = positions_[position] + 1;
  const std::int64_t n_index = n_tokens / kBlockTokens * kBlockTokens;
  const std::int64_t last = std::min(n_index, n_tokens - kWindow);
  const std::size_t group = Size(heads().group());
  const std::size_t head_floats = group * Size(heads().head_dim);
  std::vector<float> scores(group * Size(n_index));
  for (std::int32_t kv = 0; kv < heads().n_kv_heads; ++kv) {
    const Half* rows = rows_.rows(layer, kv);
    const float* q = query(layer, position) + Size(kv) * head_floats;
    const std::size_t slot = Slot(layer, position);
    const AttendHead attend = {rows,
                               q,
                               nullptr,
                               nullptr,
                               n_tokens,
                               dense_.data() +
                                   slot * Size(heads().n_heads) * Size(heads().head_dim) +
                                   Size(kv) * head_floats,
                               lse_.data() + slot * Size(heads().n_heads) + Size(kv) * group};
    backend.Attend({heads().head_dim, heads().group(), scale(), {&attend, 1}});
    const ScoreHead score = {rows, q, scores.data(), n_index};
    backend.Score({heads().head_dim, heads().group(), n_index, {&score, 1}});
    for (std::size_t h = 0; h < group; ++h) {
      const auto begin = scores.begin() + static_cast<std::ptrdiff_t>(h * Size(n_index));
      for (std::size_t i = 0; i < k.size(); ++i) {
        const std::int64_t keep = k[i] - kAlwaysKept;
        double limit = -std::numeric_limits<double>::infinity();
        if (keep < last - kSinks) {
          const auto border = begin + kSinks + keep;
          std::nth_element(begin + kSinks, border, begin + last, std::greater<>());
          limit = (static_cast<double>(*border) + *std::min_element(begin + kSinks, border)) / 2;
        }
        const std::size_t slots = Size(n_layers()) * positions_.size();
        threshold_[(i * slots + slot) * Size(heads().n_heads) + Size(kv) * group + h] = limit;
      }
    }
  }
}

}  // namespace fathom
