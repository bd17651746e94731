// SPDX-License-Identifier: MIT
// What the step bench knows of method specs.
#include <algorithm>

#include "device/bench_index.h"
#include "fathom/error.h"
#include "store/layout.h"

namespace fathom::cuda {
namespace {

std::string Option(const MethodSpec& spec, const std::string& key, const std::string& fallback) {
  const auto found = spec.options.find(key);
  return found == spec.options.end() ? fallback : found->second;
}

[[noreturn]] void NotHere(const MethodSpec& spec, const std::string& why) {
  throw Error(ErrorCode::kUnsupported, spec.ToString() + ": " + why);
}

// An option that the device takes; value null: any that the method itself takes.
struct Known {
  std::string_view method, key;
  const char* value;
};
// Values that are given here are what the device does; others would be measured under a wrong name.
constexpr Known kKnown[] = {
    {"fathom", "preset", nullptr},
    {"fathom", "bits", nullptr},
    {"fathom", "budget", nullptr},
    {"fathom", "residual", "off"},
    {"fathom", "residual", "block"},
    {"fathom", "store", "mean"},
    {"fathom", "plan", "common"},
    {"fathom", "meanbits", "4"},
    {"fathom", "basis", "raw"},
    {"sparq", "r", nullptr},
    {"sparq", "channels", "group"},
    {"double-sparsity", "c", nullptr},
    {"double-sparsity", "labels", "4bit"},
    {"loki", "r", nullptr},
    {"thumbnail", "planes", "2"},
    {"landmark", "outliers", "0"},
};

void CheckOptions(const MethodSpec& spec) {
  for (const auto& [key, value] : spec.options) {
    if (key == "rule" && value == "common") continue;
    const bool known = std::ranges::any_of(kKnown, [&](const Known& k) {
      return k.method == spec.name && k.key == key && (k.value == nullptr || k.value == value);
    });
    if (!known) NotHere(spec, "the device does not do " + key + "=" + value + "; leave it out");
  }
}

void ReadOwn(const MethodSpec& spec, BenchMethod* method) {
  if (Option(spec, "preset", "own") == "paper") {
    if (Option(spec, "residual", "off") != "off")
      NotHere(spec, "the device adds no residual to it");
    method->kind = BenchMethod::Kind::kPaper;
    method->budget = std::stod(Option(spec, "budget", "48"));
    return;
  }
  method->kind = BenchMethod::Kind::kMean;
  method->bits = std::stod(Option(spec, "bits", "28"));
  method->residual = Option(spec, "residual", "block") != "off";
}

}  // namespace

BenchMethod ParseBenchMethod(const std::string& text, std::int32_t head_dim) {
  const MethodSpec spec = MethodSpec::Parse(text);
  ValidateMethodSpec(spec);
  CheckOptions(spec);
  BenchMethod method;
  method.spec = spec.ToString();
  method.kind = BenchMethod::Kind::kLabels;
  if (spec.name == "fathom") {
    ReadOwn(spec, &method);
  } else if (spec.name == "dense") {
    method.kind = BenchMethod::Kind::kDense;
  } else if (spec.name == "exact" || spec.name == "landmark") {
    method.kind = BenchMethod::Kind::kKeys;
    method.chunk = spec.name == "exact" ? 1 : 8;
  } else if (spec.name == "sparq") {
    const int r = std::min(std::stoi(Option(spec, "r", "32")), head_dim);
    method.labels = {LabelLayout::kChannels, kPlanes, r, head_dim};
  } else if (spec.name == "double-sparsity" || spec.name == "loki") {
    const int r =
        std::min(std::stoi(Option(spec, spec.name == "loki" ? "r" : "c", "32")), head_dim);
    method.labels = {LabelLayout::kTokens, kPlanes, r,
                     layout::LabelWidth(LabelLayout::kTokens, kPlanes, r)};
    method.coordinates = spec.name == "loki" ? BenchMethod::Coordinates::kPrincipal
                                             : BenchMethod::Coordinates::kLargest;
  } else if (spec.name == "thumbnail" || spec.name == "full4") {
    const int planes = spec.name == "thumbnail" ? 2 : kPlanes;
    method.labels = {LabelLayout::kTokens, planes, head_dim,
                     layout::LabelWidth(LabelLayout::kTokens, planes, head_dim)};
  } else {
    NotHere(spec,
            "the device scans fathom, sparq, double-sparsity, loki, thumbnail, full4, landmark, "
            "exact and dense");
  }
  return method;
}

std::int64_t BenchIndexBytes(const BenchMethod& method, const BenchPlace& place) {
  const std::int64_t dim = place.sizes.heads.head_dim, blocks = place.cap_blocks();
  const std::int64_t heads = std::int64_t{place.sizes.n_layers} * place.sizes.n_heads();
  switch (method.kind) {
    case BenchMethod::Kind::kDense:
      return 0;
    case BenchMethod::Kind::kMean:
      return heads * dim * kPlanes * blocks * 8;
    case BenchMethod::Kind::kPaper:
      return heads * dim * blocks * (kPlanes * 8 + 2);
    case BenchMethod::Kind::kKeys:
      return heads * ((place.n_tokens / method.chunk + kTileTokens) / kTileTokens * kTileTokens) *
             dim * 2;
    case BenchMethod::Kind::kLabels:
      return heads * method.labels.table_width * blocks *
             (static_cast<std::int64_t>(layout::LabelBlockBytes(method.labels.planes)) + 2);
  }
  return 0;
}

}  // namespace fathom::cuda
