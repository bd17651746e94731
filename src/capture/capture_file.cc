// SPDX-License-Identifier: MIT
#include <algorithm>
#include <charconv>
#include <limits>
#include <set>
#include <string_view>

#include "capture/layout.h"
#include "fathom/capture.h"
#include "fathom/error.h"
#include "memory/safetensors.h"

namespace fathom {
namespace {

constexpr std::string_view kLayerPrefix = "layers.";
constexpr std::int64_t kMaxHeads = 1 << 16;  // fits HeadGeometry many times; the real limits follow

// The layer of "layers.3.k", -1 for other names.
std::int32_t LayerOf(std::string_view name) {
  if (name.substr(0, kLayerPrefix.size()) != kLayerPrefix) return -1;
  name.remove_prefix(kLayerPrefix.size());
  const std::string_view number = name.substr(0, name.find('.'));
  const std::string_view part = name.substr(std::min(number.size() + 1, name.size()));
  if (part != "q" && part != "k" && part != "v" && part != "q_stats") return -1;
  std::int32_t layer = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), layer);
  if (error != std::errc() || std::to_string(layer) != number) return -1;
  return layer;
}

// Where the file does not say: spread evenly over what comes before the measured positions, without
// the first tokens where that leaves room.
std::vector<std::int64_t> SpreadPositions(std::int64_t count, std::int64_t end) {
  const std::int64_t begin = end - kStatsSkip >= count ? kStatsSkip : 0;
  std::vector<std::int64_t> positions(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    // As count steps of the range would, without a product that could overflow.
    const std::int64_t range = end - begin;
    positions[static_cast<std::size_t>(i)] = begin + range / count * i + range % count * i / count;
  }
  return positions;
}

}  // namespace

struct CaptureFile::Impl {
  explicit Impl(const std::string& path) : file(path, "capture (.safetensors file)") {
    ReadMetadata();
    ReadLayers();
    ReadPositions();
  }

  Error LayerError(std::int32_t layer, const std::string& what) const {
    return file.Corrupt("layer " + std::to_string(layer) + ": " + what);
  }

  void ReadMetadata();
  std::optional<bool> Flag(const char* key) const;
  std::string Text(const char* key) const;
  void ReadLayers();
  void SetGeometry(std::int32_t layer);
  void CheckShape(std::int32_t layer, const char* part, std::int64_t n, std::int32_t n_heads) const;
  const SafetensorsTensor& Tensor(std::int32_t layer, const char* part) const;
  void ReadPositions();
  std::vector<std::int64_t> LayerPositions(std::int32_t layer, const char* part,
                                           std::int64_t count) const;
  void CheckLayer(std::int32_t layer) const;
  std::vector<float> Queries(std::int32_t layer, const char* part,
                             std::span<const std::int64_t> positions) const;

  SafetensorsFile file;
  CaptureGeometry geometry;
  std::int64_t n_queries = 0;  // P
  std::int64_t n_stats = 0;    // S
  bool positions_known = false;
};

std::string CaptureFile::Impl::Text(const char* key) const {
  const auto found = file.metadata().find(key);
  return found == file.metadata().end() ? "" : found->second;
}

std::optional<bool> CaptureFile::Impl::Flag(const char* key) const {
  const std::string text = Text(key);
  if (text.empty()) return std::nullopt;
  if (text != "true" && text != "false") {
    throw file.Corrupt(std::string("metadata ") + key + " is '" + text +
                       "', it must be 'true' or 'false'");
  }
  return text == "true";
}

void CaptureFile::Impl::ReadMetadata() {
  const std::string version = Text(kCaptureVersionKey);
  if (!version.empty() && version != kCaptureVersion) {
    throw Error(ErrorCode::kUnsupported, file.path() + ": capture version '" + version +
                                             "', known is " + kCaptureVersion +
                                             "; read it with a newer fathom");
  }
  geometry.model = Text(kModelKey);
  geometry.architecture = Text(kArchitectureKey);
  geometry.rope = Text(kRopeKey);
  geometry.text = Text(kTextKey);
  geometry.has_qk_norm = Flag(kQkNormKey);
  geometry.has_qkv_bias = Flag(kQkvBiasKey);
}

const SafetensorsTensor& CaptureFile::Impl::Tensor(std::int32_t layer, const char* part) const {
  const std::string name = CaptureTensorName(layer, part);
  const SafetensorsTensor* tensor = file.Find(name);
  if (tensor == nullptr) throw LayerError(layer, "tensor " + name + " is missing");
  return *tensor;
}

// The first layer says how many tokens, heads and queries there are.
void CaptureFile::Impl::SetGeometry(std::int32_t layer) {
  for (const char* part : {"k", "q", "q_stats"}) {
    const SafetensorsTensor& tensor = Tensor(layer, part);
    const auto& shape = tensor.shape;
    if (shape.size() == 3 && shape[0] >= 1 && shape[1] <= kMaxHeads && shape[2] <= kMaxHeads) {
      continue;
    }
    throw LayerError(layer, "tensor " + tensor.name + " has shape " + TensorShapeText(shape) +
                                ", it must be [n >= 1, heads, head_dim]");
  }
  const auto& k = Tensor(layer, "k").shape;
  const auto& q = Tensor(layer, "q").shape;
  geometry.n_tokens = k[0];
  geometry.heads = {static_cast<std::int32_t>(q[1]), static_cast<std::int32_t>(k[1]),
                    static_cast<std::int32_t>(k[2])};
  n_queries = q[0];
  n_stats = Tensor(layer, "q_stats").shape[0];
  const std::string fault = HeadsFault(geometry.heads);
  if (!fault.empty()) throw LayerError(layer, "q and k have " + fault);
  if (n_queries > geometry.n_tokens || n_stats > geometry.n_tokens - n_queries) {
    throw LayerError(layer, CaptureTensorName(layer, "q") + " has " + std::to_string(n_queries) +
                                " positions and q_stats " + std::to_string(n_stats) +
                                " others; k has only " + std::to_string(geometry.n_tokens) +
                                " tokens");
  }
}

void CaptureFile::Impl::CheckShape(std::int32_t layer, const char* part, std::int64_t n,
                                   std::int32_t n_heads) const {
  const SafetensorsTensor& tensor = Tensor(layer, part);
  const std::vector<std::int64_t> expected = {n, n_heads, geometry.heads.head_dim};
  if (tensor.shape != expected) {
    throw LayerError(layer, "tensor " + tensor.name + " has shape " +
                                TensorShapeText(tensor.shape) + ", by layer " +
                                std::to_string(geometry.layers.front()) + " it must be " +
                                TensorShapeText(expected));
  }
  if (tensor.type != TensorType::kF32 && tensor.type != TensorType::kF16 &&
      tensor.type != TensorType::kBf16) {
    throw LayerError(layer, "tensor " + tensor.name + " has dtype " +
                                std::string(TensorTypeName(tensor.type)) +
                                ", it must be F32, F16 or BF16");
  }
}

void CaptureFile::Impl::ReadLayers() {
  std::set<std::int32_t> layers;
  for (const SafetensorsTensor& tensor : file.tensors()) {
    const std::int32_t layer = LayerOf(tensor.name);
    if (layer >= 0) layers.insert(layer);
  }
  if (layers.empty()) {
    throw file.Corrupt("not a capture: no tensor has a name such as layers.0.k");
  }
  geometry.layers.assign(layers.begin(), layers.end());
  SetGeometry(geometry.layers.front());
  for (const std::int32_t layer : geometry.layers) {
    CheckShape(layer, "q", n_queries, geometry.heads.n_heads);
    CheckShape(layer, "q_stats", n_stats, geometry.heads.n_heads);
    CheckShape(layer, "k", geometry.n_tokens, geometry.heads.n_kv_heads);
    CheckShape(layer, "v", geometry.n_tokens, geometry.heads.n_kv_heads);
  }
}

std::vector<std::int64_t> CaptureFile::Impl::LayerPositions(std::int32_t layer, const char* part,
                                                            std::int64_t count) const {
  const SafetensorsTensor& tensor = Tensor(layer, part);
  const std::vector<std::int64_t> expected = {count};
  const bool integers = tensor.type == TensorType::kI64 || tensor.type == TensorType::kI32;
  if (tensor.shape != expected || !integers) {
    throw LayerError(layer, "tensor " + tensor.name + " is " + TensorShapeText(tensor.shape) +
                                " of " + std::string(TensorTypeName(tensor.type)) +
                                ", it must be " + TensorShapeText(expected) + " of I64 or I32");
  }
  return file.ReadIntegers(tensor);
}

// Either all layers say the same, or none says anything.
void CaptureFile::Impl::ReadPositions() {
  const auto has = [this](std::int32_t layer, const char* part) {
    return file.Find(CaptureTensorName(layer, part)) != nullptr;
  };
  for (const std::int32_t layer : geometry.layers) {
    positions_known =
        positions_known || has(layer, "q_positions") || has(layer, "q_stats_positions");
  }
  if (!positions_known) {
    const std::int64_t end = geometry.n_tokens - n_queries;
    for (std::int64_t i = 0; i < n_queries; ++i) geometry.q_positions.push_back(end + i);
    geometry.stats_positions = SpreadPositions(n_stats, end);
    return;
  }
  for (const std::int32_t layer : geometry.layers) {
    auto q = LayerPositions(layer, "q_positions", n_queries);
    auto stats = LayerPositions(layer, "q_stats_positions", n_stats);
    if (layer == geometry.layers.front()) {
      geometry.q_positions = std::move(q);
      geometry.stats_positions = std::move(stats);
      const std::string fault = AllPositionsFault(geometry);
      if (!fault.empty())
        throw LayerError(layer, "tensor layers." + std::to_string(layer) + "." + fault);
    } else if (q != geometry.q_positions || stats != geometry.stats_positions) {
      const char* part = q != geometry.q_positions ? "q_positions" : "q_stats_positions";
      throw LayerError(layer, "tensor " + CaptureTensorName(layer, part) +
                                  " differs from that of layer " +
                                  std::to_string(geometry.layers.front()));
    }
  }
}

void CaptureFile::Impl::CheckLayer(std::int32_t layer) const {
  if (std::binary_search(geometry.layers.begin(), geometry.layers.end(), layer)) return;
  throw Error(ErrorCode::kUsage, file.path() + ": layer " + std::to_string(layer) +
                                     " is not in this capture of " +
                                     std::to_string(geometry.layers.size()) + " layers, " +
                                     std::to_string(geometry.layers.front()) + " to " +
                                     std::to_string(geometry.layers.back()));
}

std::vector<float> CaptureFile::Impl::Queries(std::int32_t layer, const char* part,
                                              std::span<const std::int64_t> positions) const {
  CheckLayer(layer);
  const SafetensorsTensor& tensor = Tensor(layer, part);
  std::vector<float> q(static_cast<std::size_t>(tensor.elements));
  file.ReadFloats(tensor, 0, tensor.elements, q.data());
  CheckCaptureValues(
      file.path(), {layer, part, geometry.heads.n_heads, geometry.heads.head_dim, q, positions, 0},
      std::numeric_limits<float>::max());
  return q;
}

CaptureFile::CaptureFile(const std::string& path) : impl_(std::make_unique<Impl>(path)) {}
CaptureFile::~CaptureFile() = default;
CaptureFile::CaptureFile(CaptureFile&&) noexcept = default;
CaptureFile& CaptureFile::operator=(CaptureFile&&) noexcept = default;

const CaptureGeometry& CaptureFile::geometry() const { return impl_->geometry; }
const std::string& CaptureFile::path() const { return impl_->file.path(); }
std::int64_t CaptureFile::file_bytes() const { return impl_->file.file_bytes(); }
bool CaptureFile::positions_known() const { return impl_->positions_known; }

void CaptureFile::LoadRows(std::int32_t layer, std::int64_t first, std::int64_t n, float* k,
                           float* v) const {
  impl_->CheckLayer(layer);
  const CaptureGeometry& g = impl_->geometry;
  if (first < 0 || n < 0 || first > g.n_tokens || n > g.n_tokens - first) {
    throw Error(ErrorCode::kUsage, impl_->file.path() + ": " + std::to_string(n) + " tokens from " +
                                       std::to_string(first) + " are asked for, the capture has " +
                                       std::to_string(g.n_tokens));
  }
  const std::int64_t width = std::int64_t{g.heads.n_kv_heads} * g.heads.head_dim;
  const auto load = [&](const char* part, float* out) {
    impl_->file.ReadFloats(impl_->Tensor(layer, part), first * width, n * width, out);
    CheckCaptureValues(impl_->file.path(),
                       {layer,
                        part,
                        g.heads.n_kv_heads,
                        g.heads.head_dim,
                        std::span(out, static_cast<std::size_t>(n * width)),
                        {},
                        first},
                       kMaxRowValue);
  };
  load("k", k);
  load("v", v);
}

std::vector<float> CaptureFile::LoadQueries(std::int32_t layer) const {
  return impl_->Queries(layer, "q", impl_->geometry.q_positions);
}

std::vector<float> CaptureFile::LoadStatsQueries(std::int32_t layer) const {
  return impl_->Queries(layer, "q_stats", impl_->geometry.stats_positions);
}

}  // namespace fathom
