// SPDX-License-Identifier: MIT
#include <map>
#include <string>
#include <vector>

#include "fathom/calibration.h"
#include "memory/safetensors.h"
#include "method/calibration_layout.h"

namespace fathom {
namespace {

namespace file = statistics_file;

TensorType TypeOf(const std::vector<float>& /*values*/) { return TensorType::kF32; }
TensorType TypeOf(const std::vector<double>& /*values*/) { return TensorType::kF64; }
TensorType TypeOf(const std::vector<std::int32_t>& /*values*/) { return TensorType::kI64; }

void Put(SafetensorsWriter& writer, std::size_t tensor, std::int64_t first,
         const std::vector<float>& values) {
  writer.WriteFloats(tensor, first, values);
}
void Put(SafetensorsWriter& writer, std::size_t tensor, std::int64_t first,
         const std::vector<double>& values) {
  writer.WriteDoubles(tensor, first, values);
}
void Put(SafetensorsWriter& writer, std::size_t tensor, std::int64_t first,
         const std::vector<std::int32_t>& values) {
  writer.WriteIntegers(tensor, first, std::vector<std::int64_t>(values.begin(), values.end()));
}

std::string LayerName(std::int32_t layer) {
  return file::kLayerPrefix + std::to_string(layer) + ".";
}

std::vector<SafetensorsSpec> Declare(const Calibration& c) {
  std::vector<SafetensorsSpec> specs;
  for (std::size_t slot = 0; slot < c.layers.size(); ++slot) {
    file::VisitHead(
        c, slot, 0, [&](const std::string& part, file::Shape shape, file::Rule, const auto& of) {
          shape.insert(shape.begin(), c.heads.n_kv_heads);
          specs.push_back({LayerName(c.layers[slot]) + part, TypeOf(of), std::move(shape)});
        });
  }
  const auto n_layers = static_cast<std::int64_t>(c.layers.size());
  for (const auto& [key, factors] : c.residual) {
    specs.push_back({file::kResidualPrefix + key, TypeOf(factors), {n_layers, c.heads.n_heads}});
  }
  for (const auto& [key, bits] : c.budgets) {
    specs.push_back({file::kBudgetsPrefix + key, TypeOf(bits), {n_layers}});
  }
  return specs;
}

}  // namespace

void Calibration::Save(const std::string& path) const {
  const std::vector<SafetensorsSpec> specs = Declare(*this);
  std::map<std::string, std::size_t> place;
  for (std::size_t i = 0; i < specs.size(); ++i) place[specs[i].name] = i;
  SafetensorsWriter writer(path, specs,
                           {{file::kVersionKey, std::to_string(file::kVersion)},
                            {file::kHeadsKey, std::to_string(heads.n_heads)},
                            {file::kTokensKey, std::to_string(n_tokens)},
                            {file::kModelKey, model},
                            {file::kSourceKey, source}});
  for (std::size_t slot = 0; slot < layers.size(); ++slot) {
    for (std::int32_t kv = 0; kv < heads.n_kv_heads; ++kv) {
      file::VisitHead(
          *this, slot, static_cast<std::size_t>(kv),
          [&](const std::string& part, const file::Shape&, file::Rule, const auto& values) {
            Put(writer, place.at(LayerName(layers[slot]) + part),
                kv * static_cast<std::int64_t>(values.size()), values);
          });
    }
  }
  for (const auto& [key, factors] : residual) {
    Put(writer, place.at(file::kResidualPrefix + key), 0, factors);
  }
  for (const auto& [key, bits] : budgets) {
    Put(writer, place.at(file::kBudgetsPrefix + key), 0, bits);
  }
  writer.Commit();
}

}  // namespace fathom
