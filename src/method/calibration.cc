// SPDX-License-Identifier: MIT
#include "fathom/calibration.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "fathom/error.h"

namespace fathom {
namespace {

std::string HeadsText(const HeadGeometry& heads) {
  return std::to_string(heads.n_heads) + " heads, " + std::to_string(heads.n_kv_heads) +
         " KV heads of dimension " + std::to_string(heads.head_dim);
}

std::string LayersText(std::span<const std::int32_t> layers) {
  std::string text;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t j = i;
    while (j + 1 < layers.size() && layers[j + 1] == layers[j] + 1) ++j;
    text += (text.empty() ? "" : ", ") + std::to_string(layers[i]);
    if (j > i) text += " to " + std::to_string(layers[j]);
    i = j + 1;
  }
  return text;
}

// Entry `slot` of rows of n, appended.
template <typename T>
void AppendRow(const std::vector<T>& from, std::size_t slot, std::size_t n, std::vector<T>* to) {
  const auto begin = from.begin() + static_cast<std::ptrdiff_t>(slot * n);
  to->insert(to->end(), begin, begin + static_cast<std::ptrdiff_t>(n));
}

template <typename Map>
auto FindKey(const Map& map, std::string_view spec) {
  const auto found = map.find(CalibrationKey(spec));
  return found == map.end() ? nullptr : &found->second;
}

}  // namespace

std::string CalibrationKey(std::string_view canonical_spec) {
  std::string key(canonical_spec);
  for (const char* option : {",min=", ":min=", ",values=", ":values="}) {
    const std::size_t at = key.find(option);
    if (at == std::string::npos) continue;
    const std::size_t end = key.find(',', at + 1);
    // What follows the first option takes its place.
    const bool first = option[0] == ':';
    if (end == std::string::npos) {
      key.erase(at);
    } else {
      key.erase(first ? at + 1 : at, end - at);
    }
  }
  return key;
}

void Calibration::Check(std::int32_t n_layers, HeadGeometry geometry) const {
  std::vector<std::int32_t> all(static_cast<std::size_t>(n_layers));
  std::iota(all.begin(), all.end(), 0);
  if (layers == all && geometry == heads) return;
  throw Error(ErrorCode::kUsage, "the statistics are of " + HeadsText(heads) + " in layers " +
                                     LayersText(layers) + ", and this model has " +
                                     HeadsText(geometry) + " in layers " + LayersText(all) +
                                     "; calibrate on all layers of this model (fathom calibrate)");
}

void Calibration::CheckLayers(std::span<const std::int32_t> chosen, HeadGeometry geometry) const {
  const bool there = std::ranges::all_of(chosen, [this](std::int32_t layer) {
    return std::ranges::find(layers, layer) != layers.end();
  });
  if (there && geometry == heads) return;
  throw Error(ErrorCode::kUsage, "the statistics are of " + HeadsText(heads) + " in layers " +
                                     LayersText(layers) + ", and asked for are " +
                                     HeadsText(geometry) + " in layers " + LayersText(chosen) +
                                     "; calibrate on the same model and all layers (fathom "
                                     "calibrate)");
}

std::shared_ptr<const Calibration> Calibration::Select(std::span<const std::int32_t> chosen) const {
  CheckLayers(chosen, heads);
  auto selected = std::make_shared<Calibration>();
  selected->heads = heads;
  selected->n_tokens = n_tokens;
  selected->source = source;
  selected->model = model;
  const auto n_kv = static_cast<std::size_t>(heads.n_kv_heads);
  const auto n_heads = static_cast<std::size_t>(heads.n_heads);
  for (const std::int32_t layer : chosen) {
    const auto slot = static_cast<std::size_t>(std::ranges::find(layers, layer) - layers.begin());
    selected->layers.push_back(layer);
    AppendRow(moments, slot, n_kv, &selected->moments);
    AppendRow(head_calibrations, slot, n_kv * kBasisRules, &selected->head_calibrations);
    for (const auto& [key, of_spec] : residual) {
      AppendRow(of_spec, slot, n_heads, &selected->residual[key]);
    }
    for (const auto& [key, of_spec] : budgets) {
      AppendRow(of_spec, slot, 1, &selected->budgets[key]);
    }
  }
  return selected;
}

const std::vector<float>* Calibration::FindResidual(std::string_view canonical_spec) const {
  return FindKey(residual, canonical_spec);
}

const std::vector<double>* Calibration::FindBudgets(std::string_view canonical_spec) const {
  return FindKey(budgets, canonical_spec);
}

}  // namespace fathom
