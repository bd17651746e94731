// SPDX-License-Identifier: MIT
#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "capture/layout.h"
#include "fathom/capture.h"
#include "fathom/error.h"
#include "memory/safetensors.h"

namespace fathom {
namespace {

// The tensors of a layer, in the order in which they are declared.
enum Part : std::size_t { kQ, kK, kV, kQStats, kQPositions, kStatsPositions, kParts };

// Largest magnitudes that stay within fp16 rows and fp32 after rounding to the stored type.
constexpr float kMaxBf16RowValue = 65280.0F;
constexpr float kMaxBf16 = 0x1.FEp127F;

void CheckGeometry(const CaptureGeometry& geometry) {
  std::string fault = HeadsFault(geometry.heads);
  if (fault.empty() && geometry.n_tokens < 1) fault = "no tokens";
  if (fault.empty()) fault = AllPositionsFault(geometry);
  if (fault.empty() && geometry.layers.empty()) fault = "no layers; name at least one";
  for (std::size_t i = 0; fault.empty() && i < geometry.layers.size(); ++i) {
    if (geometry.layers[i] < 0 || (i > 0 && geometry.layers[i] <= geometry.layers[i - 1])) {
      fault = "layer " + std::to_string(geometry.layers[i]) + "; layers must ascend from 0";
    }
  }
  if (!fault.empty()) throw Error(ErrorCode::kUsage, "a capture cannot have " + fault);
}

std::vector<SafetensorsSpec> Declare(const CaptureGeometry& g, CaptureType type) {
  const TensorType stored = type == CaptureType::kF32 ? TensorType::kF32 : TensorType::kBf16;
  const auto n_queries = static_cast<std::int64_t>(g.q_positions.size());
  const auto n_stats = static_cast<std::int64_t>(g.stats_positions.size());
  const std::int64_t n_heads = g.heads.n_heads;
  const std::int64_t n_kv_heads = g.heads.n_kv_heads;
  const std::int64_t dim = g.heads.head_dim;
  std::vector<SafetensorsSpec> specs;
  for (const std::int32_t layer : g.layers) {
    const auto add = [&](const char* part, TensorType t, std::vector<std::int64_t> shape) {
      specs.push_back({CaptureTensorName(layer, part), t, std::move(shape)});
    };
    add("q", stored, {n_queries, n_heads, dim});
    add("k", stored, {g.n_tokens, n_kv_heads, dim});
    add("v", stored, {g.n_tokens, n_kv_heads, dim});
    add("q_stats", stored, {n_stats, n_heads, dim});
    add("q_positions", TensorType::kI64, {n_queries});
    add("q_stats_positions", TensorType::kI64, {n_stats});
  }
  return specs;
}

std::map<std::string, std::string> Metadata(const CaptureGeometry& g) {
  std::map<std::string, std::string> metadata = {{kCaptureVersionKey, kCaptureVersion}};
  const auto text = [&](const char* key, const std::string& value) {
    if (!value.empty()) metadata[key] = value;
  };
  const auto flag = [&](const char* key, std::optional<bool> value) {
    if (value) metadata[key] = *value ? "true" : "false";
  };
  text(kModelKey, g.model);
  text(kArchitectureKey, g.architecture);
  text(kRopeKey, g.rope);
  text(kTextKey, g.text);
  flag(kQkNormKey, g.has_qk_norm);
  flag(kQkvBiasKey, g.has_qkv_bias);
  return metadata;
}

}  // namespace

struct CaptureWriter::Impl {
  Impl(std::string file_path, const CaptureGeometry& file_geometry, CaptureType file_type)
      : path(std::move(file_path)),
        geometry(file_geometry),
        type(file_type),
        file(path, Declare(geometry, type), Metadata(geometry)) {
    for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
      file.WriteIntegers(i * kParts + kQPositions, 0, geometry.q_positions);
      file.WriteIntegers(i * kParts + kStatsPositions, 0, geometry.stats_positions);
    }
  }

  void WriteRows(std::size_t layer, Part part, std::int64_t first, std::int64_t n, const float* x);
  void WriteQueries(std::size_t layer, Part part, std::span<const std::int64_t> positions,
                    std::int64_t first, std::int64_t n, const float* q);

  std::string path;
  CaptureGeometry geometry;
  CaptureType type;
  SafetensorsWriter file;
};

// layer: place among the captured ones.
void CaptureWriter::Impl::WriteRows(std::size_t layer, Part part, std::int64_t first,
                                    std::int64_t n, const float* x) {
  const HeadGeometry& heads = geometry.heads;
  const std::int64_t width = std::int64_t{heads.n_kv_heads} * heads.head_dim;
  const std::span values(x, static_cast<std::size_t>(n * width));
  CheckCaptureValues(path,
                     {geometry.layers[layer],
                      part == kK ? "k" : "v",
                      heads.n_kv_heads,
                      heads.head_dim,
                      values,
                      {},
                      first},
                     type == CaptureType::kF32 ? kMaxRowValue : kMaxBf16RowValue);
  file.WriteFloats(layer * kParts + part, first * width, values);
}

// Those of the positions that lie in the chunk first .. first + n - 1.
void CaptureWriter::Impl::WriteQueries(std::size_t layer, Part part,
                                       std::span<const std::int64_t> positions, std::int64_t first,
                                       std::int64_t n, const float* q) {
  const HeadGeometry& heads = geometry.heads;
  const std::int64_t width = std::int64_t{heads.n_heads} * heads.head_dim;
  const float limit = type == CaptureType::kF32 ? std::numeric_limits<float>::max() : kMaxBf16;
  for (auto p = std::lower_bound(positions.begin(), positions.end(), first);
       p != positions.end() && *p < first + n; ++p) {
    const std::span values(q + (*p - first) * width, static_cast<std::size_t>(width));
    CheckCaptureValues(path,
                       {geometry.layers[layer],
                        part == kQ ? "q" : "q_stats",
                        heads.n_heads,
                        heads.head_dim,
                        values,
                        {},
                        *p},
                       limit);
    file.WriteFloats(layer * kParts + part, (p - positions.begin()) * width, values);
  }
}

CaptureWriter::CaptureWriter(const std::string& path, const CaptureGeometry& geometry,
                             CaptureType type) {
  CheckGeometry(geometry);
  impl_ = std::make_unique<Impl>(path, geometry, type);
}
CaptureWriter::~CaptureWriter() = default;
CaptureWriter::CaptureWriter(CaptureWriter&&) noexcept = default;
CaptureWriter& CaptureWriter::operator=(CaptureWriter&&) noexcept = default;

void CaptureWriter::Write(std::int32_t layer, std::int64_t first, std::int64_t n, const float* q,
                          const float* k, const float* v) {
  const auto& layers = impl_->geometry.layers;
  const auto found = std::lower_bound(layers.begin(), layers.end(), layer);
  if (found == layers.end() || *found != layer) return;
  const auto i = static_cast<std::size_t>(found - layers.begin());
  impl_->WriteRows(i, kK, first, n, k);
  impl_->WriteRows(i, kV, first, n, v);
  impl_->WriteQueries(i, kQ, impl_->geometry.q_positions, first, n, q);
  impl_->WriteQueries(i, kQStats, impl_->geometry.stats_positions, first, n, q);
}

void CaptureWriter::Commit() { impl_->file.Commit(); }

std::int64_t CaptureWriter::file_bytes() const { return impl_->file.file_bytes(); }

}  // namespace fathom
