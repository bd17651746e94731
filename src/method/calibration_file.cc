// SPDX-License-Identifier: MIT
// Reads statistics files: nothing in them is trusted.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <set>
#include <utility>

#include "fathom/calibration.h"
#include "fathom/error.h"
#include "fathom/method.h"
#include "memory/safetensors.h"
#include "method/calibration_layout.h"

namespace fathom {
namespace {

using statistics_file::Rule;
using statistics_file::Shape;
namespace file = statistics_file;

constexpr std::int64_t kMaxCount = std::int64_t{1} << 40;

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::string NumberText(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.6g", value);
  return text.data();
}

// "[2][5]" of an element.
std::string ElementText(const Shape& shape, std::int64_t at) {
  std::string text;
  for (std::size_t i = shape.size(); i-- > 0; at /= shape[i]) {
    text.insert(0, "[" + std::to_string(at % shape[i]) + "]");
  }
  return text;
}

}  // namespace

std::string file::PairFault(const Basis& basis) {
  // Maps are kept in single precision; what a pair of them leaves of the identity is rounding.
  constexpr double kTolerance = 1e-3;
  const std::size_t dim = Size(basis.dim);
  for (std::size_t a = 0; a < dim; ++a) {
    for (std::size_t b = 0; b < dim; ++b) {
      const float* k = basis.key_map.data() + a * dim;
      const float* q = basis.query_map.data() + b * dim;
      double product = 0;
      for (std::size_t j = 0; j < dim; ++j) product += static_cast<double>(k[j]) * q[j];
      const double error = std::fabs(product - (a == b ? 1.0 : 0.0));
      if (error <= kTolerance) continue;  // false for NaN
      return "no exact pair: their product at [" + std::to_string(a) + "][" + std::to_string(b) +
             "] is " + NumberText(product) + ", " + NumberText(error) +
             " off the identity; at most " + NumberText(kTolerance) + " is rounding";
    }
  }
  return "";
}

namespace {

class Reader {
 public:
  explicit Reader(const std::string& path) : file_(path, "statistics file") {}

  void Read(Calibration* c) {
    ReadMetadata(c);
    ReadGeometry(c);
    const std::size_t n = c->layers.size() * Size(c->heads.n_kv_heads);
    c->moments.resize(n);
    c->head_calibrations.resize(n * kBasisRules);
    for (std::size_t slot = 0; slot < c->layers.size(); ++slot) ReadLayer(c, slot);
    ReadFitted(c);
  }

 private:
  Error Corrupt(const std::string& what) const { return file_.Corrupt(what); }

  std::string Text(const char* key) const {
    const auto found = file_.metadata().find(key);
    return found == file_.metadata().end() ? "" : found->second;
  }

  std::int64_t Number(const char* key) const {
    const std::string text = Text(key);
    std::int64_t value = 0;
    const char* last = text.data() + text.size();
    const auto [end, error] = std::from_chars(text.data(), last, value);
    if (error != std::errc() || end != last || value < 1 || value > kMaxCount) {
      throw Corrupt("metadata " + std::string(key) + " is '" + text +
                    "', it must be a positive whole number");
    }
    return value;
  }

  void ReadMetadata(Calibration* c) const {
    if (!file_.metadata().contains(file::kVersionKey)) {
      throw Corrupt("not a statistics file: metadata " + std::string(file::kVersionKey) +
                    " is missing; make one with fathom calibrate");
    }
    const std::int64_t version = Number(file::kVersionKey);
    if (version > file::kVersion) {
      throw Error(ErrorCode::kUnsupported,
                  file_.path() + ": statistics version " + std::to_string(version) + ", known is " +
                      std::to_string(file::kVersion) + "; read it with a newer fathom");
    }
    c->n_tokens = Number(file::kTokensKey);
    c->model = Text(file::kModelKey);
    c->source = Text(file::kSourceKey);
  }

  void ReadGeometry(Calibration* c) const {
    std::set<std::int32_t> layers;
    for (const SafetensorsTensor& tensor : file_.tensors()) {
      const std::int32_t layer = LayerOf(tensor.name);
      if (layer >= 0) layers.insert(layer);
    }
    if (layers.empty()) throw Corrupt("no tensor is named layers.N.*: it holds no layer");
    c->layers.assign(layers.begin(), layers.end());
    const std::string name =
        file::kLayerPrefix + std::to_string(c->layers.front()) + "." + file::kFirstPart;
    const SafetensorsTensor* first = file_.Find(name);
    if (first == nullptr) throw Corrupt("tensor " + name + " is missing");
    const std::int64_t n_heads = Number(file::kHeadsKey);
    const Shape& shape = first->shape;
    const bool fits = shape.size() == 2 && shape[0] >= 1 && n_heads % shape[0] == 0 &&
                      n_heads / shape[0] <= kMaxGroup && n_heads <= 1 << 16 && shape[1] >= 16 &&
                      shape[1] <= kMaxHeadDim && shape[1] % 16 == 0;
    if (!fits) {
      throw Corrupt("tensor " + name + " has shape " + TensorShapeText(shape) + " and there are " +
                    std::to_string(n_heads) +
                    " heads; it must be [n_kv_heads, head_dim] with 1 to " +
                    std::to_string(kMaxGroup) + " heads per KV head and head_dim a multiple of " +
                    "16 up to " + std::to_string(kMaxHeadDim));
    }
    c->heads = {static_cast<std::int32_t>(n_heads), static_cast<std::int32_t>(shape[0]),
                static_cast<std::int32_t>(shape[1])};
  }

  // The layer of "layers.3.key_mean", -1 for other names.
  static std::int32_t LayerOf(std::string_view name) {
    if (!name.starts_with(file::kLayerPrefix)) return -1;
    name.remove_prefix(std::string_view(file::kLayerPrefix).size());
    const std::string_view number = name.substr(0, name.find('.'));
    std::int32_t layer = -1;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), layer);
    return error == std::errc() && std::to_string(layer) == number ? layer : -1;
  }

  const SafetensorsTensor& Tensor(const std::string& name, TensorType type,
                                  const Shape& shape) const {
    const SafetensorsTensor* tensor = file_.Find(name);
    if (tensor == nullptr) throw Corrupt("tensor " + name + " is missing");
    if (tensor->type != type) {
      throw Corrupt("tensor " + name + " has dtype " + std::string(TensorTypeName(tensor->type)) +
                    ", it must be " + std::string(TensorTypeName(type)));
    }
    if (tensor->shape != shape) {
      throw Corrupt("tensor " + name + " has shape " + TensorShapeText(tensor->shape) +
                    ", it must be " + TensorShapeText(shape));
    }
    return *tensor;
  }

  void Get(const std::string& name, const Shape& shape, std::int64_t first, std::int64_t n,
           std::vector<float>* out) const {
    out->resize(Size(n));
    file_.ReadFloats(Tensor(name, TensorType::kF32, shape), first, n, out->data());
  }
  void Get(const std::string& name, const Shape& shape, std::int64_t first, std::int64_t n,
           std::vector<double>* out) const {
    out->resize(Size(n));
    file_.ReadDoubles(Tensor(name, TensorType::kF64, shape), first, n, out->data());
  }
  // Values that no channel number can be become -1.
  void Get(const std::string& name, const Shape& shape, std::int64_t first, std::int64_t n,
           std::vector<std::int32_t>* out) const {
    const auto all = file_.ReadIntegers(Tensor(name, TensorType::kI64, shape));
    out->resize(Size(n));
    std::transform(all.begin() + first, all.begin() + first + n, out->begin(), [](auto value) {
      return value >= 0 && value < kMaxHeadDim ? static_cast<std::int32_t>(value) : -1;
    });
  }

  template <typename T>
  void CheckValues(const std::string& name, const Shape& shape, std::int64_t first, Rule rule,
                   const std::vector<T>& values) const {
    std::vector<char> seen(rule == Rule::kPermutation ? values.size() : 0);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto value = static_cast<double>(values[i]);
      bool good = std::isfinite(value);
      if (rule == Rule::kNotNegative) good = good && value >= 0;
      if (rule == Rule::kPositive) good = good && value > 0;
      if (rule == Rule::kPermutation) {
        good = value >= 0 && value < static_cast<double>(values.size()) &&
               std::exchange(seen[static_cast<std::size_t>(value)], 1) == 0;
      }
      if (good) continue;
      const char* must = rule == Rule::kFinite        ? "finite"
                         : rule == Rule::kNotNegative ? "finite and at least 0"
                         : rule == Rule::kPositive    ? "finite and above 0"
                                                      : "each of the channels once";
      throw Corrupt("tensor " + name + ElementText(shape, first + static_cast<std::int64_t>(i)) +
                    " is " +
                    (rule == Rule::kPermutation && value < 0 ? "no channel" : NumberText(value)) +
                    "; values must be " + must);
    }
  }

  void ReadLayer(Calibration* c, std::size_t slot) const {
    const std::string prefix = file::kLayerPrefix + std::to_string(c->layers[slot]) + ".";
    for (std::int32_t kv = 0; kv < c->heads.n_kv_heads; ++kv) {
      file::VisitHead(*c, slot, Size(kv),
                      [&](const std::string& part, Shape shape, Rule rule, auto& values) {
                        std::int64_t n = 1;
                        for (const std::int64_t size : shape) n *= size;
                        shape.insert(shape.begin(), c->heads.n_kv_heads);
                        Get(prefix + part, shape, kv * n, n, &values);
                        CheckValues(prefix + part, shape, kv * n, rule, values);
                      });
      const std::size_t head = slot * Size(c->heads.n_kv_heads) + Size(kv);
      for (int rule = 0; rule < kBasisRules; ++rule) {
        Basis& basis = c->head_calibrations[head * kBasisRules + Size(rule)].stats.basis;
        basis.dim = c->heads.head_dim;
        if (file::HasMap(static_cast<BasisRule>(rule))) {
          CheckPair(prefix + file::BasisName(static_cast<BasisRule>(rule)), kv, basis);
        }
      }
    }
  }

  void CheckPair(const std::string& name, std::int32_t kv_head, const Basis& basis) const {
    const std::string fault = file::PairFault(basis);
    if (fault.empty()) return;
    throw Corrupt("tensors " + name + ".key_map and " + name + ".query_map, KV head " +
                  std::to_string(kv_head) + ": " + fault);
  }

  // The method spec that a tensor is named after.
  std::string KeyOf(const SafetensorsTensor& tensor, std::string_view prefix) const {
    std::string key = tensor.name.substr(prefix.size());
    try {
      MethodSpec::Parse(key);
    } catch (const Error& error) {
      throw Corrupt("tensor " + tensor.name + " is named after no method: " + error.what());
    }
    return key;
  }

  void ReadFitted(Calibration* c) const {
    const auto n_layers = static_cast<std::int64_t>(c->layers.size());
    const Shape of_heads = {n_layers, c->heads.n_heads};
    for (const SafetensorsTensor& tensor : file_.tensors()) {
      if (tensor.name.starts_with(file::kResidualPrefix)) {
        auto& values = c->residual[KeyOf(tensor, file::kResidualPrefix)];
        Get(tensor.name, of_heads, 0, n_layers * c->heads.n_heads, &values);
        CheckValues(tensor.name, of_heads, 0, Rule::kNotNegative, values);
      } else if (tensor.name.starts_with(file::kBudgetsPrefix)) {
        auto& values = c->budgets[KeyOf(tensor, file::kBudgetsPrefix)];
        Get(tensor.name, {n_layers}, 0, n_layers, &values);
        CheckValues(tensor.name, {n_layers}, 0, Rule::kPositive, values);
      }
    }
  }

  SafetensorsFile file_;
};

}  // namespace

std::shared_ptr<const Calibration> Calibration::Open(const std::string& path) {
  auto calibration = std::make_shared<Calibration>();
  Reader(path).Read(calibration.get());
  return calibration;
}

}  // namespace fathom
