// SPDX-License-Identifier: MIT
#include "device/bench_rows.h"

#include "backend/cuda/append_rows.h"
#include "device/bench_packer.h"

namespace fathom::cuda {
namespace {

DeviceBuffer<std::int32_t> Filled(std::int64_t n, std::int64_t value) {
  return ToDevice(std::vector<std::int32_t>(Size(n), static_cast<std::int32_t>(value)));
}

}  // namespace

std::int64_t BenchRows::Bytes(const StepSizes& sizes, std::int64_t modulus) {
  return modulus * sizes.n_layers * sizes.n_heads() * 2 * sizes.heads.head_dim *
         static_cast<std::int64_t>(sizeof(Half));
}

BenchRows::BenchRows(const StepSizes& sizes, std::int64_t n_tokens, std::int64_t modulus,
                     bool residual, BenchKeys* keys, HostArena* arena, cudaStream_t stream,
                     const BenchProgress& progress)
    : sizes_(sizes),
      n_tokens_(n_tokens),
      modulus_(modulus),
      modulus_device_(Filled(1, modulus)),
      recent_first_(Filled(sizes.batch, n_tokens - kRing + kBlockTokens)),
      positions_(Filled(sizes.batch, n_tokens - 1)) {
  const std::int64_t layers = sizes.n_layers, heads = sizes.n_heads(), dim = sizes.heads.head_dim;
  const std::int64_t blocks = n_tokens / kBlockTokens;
  sinks_.Reserve(Size(layers * heads * kSinks * Row()));
  ring_.Reserve(Size(layers * heads * kRing * Row()));
  if (residual) {
    means_.Reserve(Size(layers * heads * blocks * dim));
    mean_value_.Reserve(Size(layers * heads * dim));
    factor_ = ToDevice(std::vector<float>(Size(sizes.n_lists()), 1.0F));
  }
  for (std::int32_t layer = 0; layer < sizes.n_layers; ++layer) {
    auto* base = reinterpret_cast<Half*>(
        arena->Allocate(heads * modulus * Row() * static_cast<std::int64_t>(sizeof(Half))));
    rows_.push_back(Pointers(base, heads, modulus * Row()));
    const_rows_.push_back(Pointers<const Half>(base, heads, modulus * Row()));
    keys->Fill(layer, rows_.back().data(), 0, modulus, stream);
    FillResident(layer, keys, stream);
    if (residual) {
      Half* means = means_.data() + layer * heads * blocks * dim;
      mean_lists_.push_back(Pointers<const Half>(means, heads, blocks * dim));
      keys->FillValueMeans(layer, means, blocks, mean_value_.data() + layer * heads * dim, stream);
    }
    Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    if (progress) progress(layer + 1, layers);
  }
}

// The ring's slots begin anew at a multiple of its length: two pieces.
void BenchRows::FillResident(std::int32_t layer, BenchKeys* keys, cudaStream_t stream) {
  const std::int64_t heads = sizes_.n_heads(), at = layer * heads * Row();
  const std::int64_t first = n_tokens_ - kRing, slot = first % kRing;
  Half* ring = ring_.data() + at * kRing;
  const auto sinks = Pointers(sinks_.data() + at * kSinks, heads, kSinks * Row());
  const auto upper = Pointers(ring + slot * Row(), heads, kRing * Row());
  const auto lower = Pointers(ring, heads, kRing * Row());
  keys->Fill(layer, sinks.data(), 0, kSinks, stream);
  keys->Fill(layer, upper.data(), first, kRing - slot, stream);
  keys->Fill(layer, lower.data(), n_tokens_ - slot, slot, stream);
  Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // the pointers end here
}

LayerRows BenchRows::Of(std::int32_t layer) const {
  const std::int64_t at = std::int64_t{layer} * sizes_.n_heads();
  LayerRows rows;
  rows.source = {const_rows_[Size(layer)].data(),
                 modulus_device_.data(),
                 {sinks_.data() + at * kSinks * Row(), ring_.data() + at * kRing * Row(), kRing,
                  recent_first_.data()}};
  if (!mean_lists_.empty()) {
    rows.value_means = mean_lists_[Size(layer)].data();
    rows.mean_value = mean_value_.data() + at * sizes_.heads.head_dim;
    rows.factor = factor_.data();
  }
  return rows;
}

StepVectors BenchRows::Vectors(std::int32_t layer, float* q, float* k, float* v) const {
  const std::int64_t at = std::int64_t{layer} * sizes_.n_heads() * kRing * Row();
  return {q, k, v, positions_.data(), ring_.data() + at, kRing};
}

void BenchRows::Append(std::int32_t layer, const StepVectors& vectors, cudaStream_t stream) const {
  const std::int64_t at = std::int64_t{layer} * sizes_.n_heads() * kRing * Row();
  cuda::Append({sizes_.n_heads(), sizes_.heads.n_kv_heads, sizes_.heads.head_dim, vectors.k,
                vectors.v, positions_.data(), nullptr, ring_.data() + at, kRing,
                rows_[Size(layer)].data(), static_cast<std::int32_t>(modulus_)},
               stream);
}

}  // namespace fathom::cuda
