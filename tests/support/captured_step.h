// SPDX-License-Identifier: MIT
// Steps of the benchmark without its dense layers, over a small capture that is made here or over
// synthetic keys.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/host_arena.h"
#include "device/bench_index.h"
#include "device/bench_rows.h"
#include "device/captured_keys.h"
#include "fathom/capture.h"
#include "support/cuda_step.h"
#include "support/temp_dir.h"

namespace fathom::test {

inline constexpr std::int64_t kTileBlocks = 7;
inline constexpr std::int64_t kTile = kTileBlocks * kBlockTokens;  // m of the captures made here
inline constexpr std::int64_t kK = 128;
inline constexpr HeadGeometry kHeads = {4, 2, 64};

// Two layers, 2 and 5, of keys of different strength; 8 measured positions.
inline std::string WriteCapture(const TempDir& folder, HeadGeometry heads = kHeads,
                                std::int64_t n_tokens = kTile + 20,
                                std::int64_t first_sample = 16) {
  CaptureGeometry g;
  g.n_tokens = n_tokens;
  g.heads = heads;
  g.layers = {2, 5};
  for (std::int64_t p = n_tokens - 8; p < n_tokens; ++p) g.q_positions.push_back(p);
  for (std::int64_t p = first_sample; p < n_tokens - 8; p += 8) g.stats_positions.push_back(p);
  g.model = "made";
  std::string path = (folder.path() / "made.safetensors").string();
  CaptureWriter writer(path, g, CaptureType::kF32);
  for (const std::int32_t layer : g.layers) {
    const auto seed = static_cast<std::uint64_t>(layer);
    const std::int32_t width = heads.n_kv_heads * heads.head_dim;
    std::vector<float> k = RandomData(DataKind::kNormal, n_tokens, width, seed);
    for (float& x : k) x *= layer == 2 ? 1.0F : 0.2F;
    std::vector<float> q = RandomNormal(n_tokens * heads.n_heads * heads.head_dim, seed + 9);
    for (float& x : q) x *= 8;  // unlike those of the dense layers
    writer.Write(layer, 0, n_tokens, q.data(), k.data(),
                 RandomNormal(n_tokens * width, seed + 20).data());
  }
  writer.Commit();
  return path;
}

inline StepShape ShapeOf(HeadGeometry heads, std::int32_t n_layers) {
  StepShape shape;
  shape.name = "made";
  shape.n_layers = n_layers;
  shape.heads = heads;
  return shape;
}

// Rows, index and attention of a step over a capture, without dense layers; over synthetic keys
// where the path is empty.
class CapturedRun {
 public:
  CapturedRun(const std::string& path, HeadGeometry heads, std::int32_t n_layers, int batch,
              std::int64_t length, const std::string& spec, bool on_host, std::int64_t fold = 0)
      : sizes{heads, n_layers, batch, length, kK, false},
        n_tokens(length),
        modulus(fold > 0 ? fold : length),
        data(path.empty() ? nullptr
                          : std::make_shared<cuda::CaptureData>(path, ShapeOf(heads, n_layers))),
        keys(path.empty() ? cuda::MakeSyntheticKeys(sizes, 1, stream.get())
                          : cuda::MakeCapturedKeys(sizes, data, stream.get())),
        method(cuda::ParseBenchMethod(spec, heads.head_dim)),
        place{sizes, length, on_host, 1},
        arena(cuda::BenchRows::Bytes(sizes, modulus) +
              (on_host ? cuda::BenchIndexBytes(method, place) : 0) + (std::int64_t{1} << 20)),
        attention(sizes, method.chunk),
        q(Size(std::int64_t{sizes.n_lists()} * heads.head_dim)),
        k(Size(std::int64_t{sizes.n_heads()} * heads.head_dim)),
        v(k.size()),
        out(q.size()) {
    arena.Wait();
    attention.SetLengths(std::vector<std::int64_t>(Size(batch), n_tokens), false, stream.get());
    index = cuda::MakeBenchIndex(method, place, keys.get(), attention.scan_lengths(), &arena,
                                 stream.get(), {});
    rows = std::make_unique<cuda::BenchRows>(sizes, n_tokens, modulus, true, keys.get(), &arena,
                                             stream.get(), cuda::BenchProgress());
    if (index != nullptr && data != nullptr) index->FitMultiplier(keys->FitQueries());
  }

  // One layer; the step's queries are in q then.
  void Record(std::int32_t layer, cudaStream_t s) {
    const cuda::StepVectors vectors = rows->Vectors(layer, q.data(), k.data(), v.data());
    keys->TakeStep(layer, vectors, s);
    rows->Append(layer, vectors, s);
    attention.Run(layer, index->scan(), rows->Of(layer), q.data(), out.data(), s);
  }

  std::int64_t shift() const { return keys->tiling()->shift; }
  // Row of a token as it must be: of the capture, key and value.
  const Half* Row(std::int32_t layer, std::int32_t head, std::int64_t token) const {
    const RowStore& from = data->rows();
    const std::int32_t sequence = head / sizes.heads.n_kv_heads;
    const std::int64_t at = (token + sequence * shift() * kBlockTokens) % data->keys().n_tokens;
    return from.rows(layer % from.n_layers(),
                     head % sizes.heads.n_kv_heads % from.geometry().n_kv_heads) +
           at * 2 * sizes.heads.head_dim;
  }
  std::vector<Half> Rows(std::int32_t layer, std::int32_t head, std::int64_t first,
                         std::int64_t n) const {
    std::vector<Half> all;
    for (std::int64_t i = first; i < first + n; ++i) {
      const Half* row = Row(layer, head, i);
      all.insert(all.end(), row, row + 2 * sizes.heads.head_dim);
    }
    return all;
  }

  const cuda::StepSizes sizes;
  const std::int64_t n_tokens, modulus;
  cuda::Stream stream;
  std::shared_ptr<const cuda::CaptureData> data;
  std::unique_ptr<cuda::BenchKeys> keys;
  const cuda::BenchMethod method;
  const cuda::BenchPlace place;
  cuda::HostArena arena;
  cuda::AttentionStep attention;
  cuda::DeviceBuffer<float> q, k, v, out;
  std::unique_ptr<cuda::BenchIndex> index;
  std::unique_ptr<cuda::BenchRows> rows;
};

// n halfs of a head, at the address that a device array gives: memory of the device, or of the
// host.
inline std::vector<Half> DeviceHalfs(const Half* const* addresses, std::int32_t head,
                                     std::int64_t n) {
  return ToHost(ToHost(addresses + head, 1).front(), Size(n));
}
inline std::vector<Half> HostHalfs(const Half* const* addresses, std::int32_t head,
                                   std::int64_t n) {
  const Half* at = ToHost(addresses + head, 1).front();
  return {at, at + n};
}

}  // namespace fathom::test
