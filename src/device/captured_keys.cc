// SPDX-License-Identifier: MIT
#include "device/captured_keys.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/host_copy.h"
#include "base/parallel.h"
#include "eval/capture_rows.h"
#include "fathom/error.h"
#include "memory/system_memory.h"
#include "method/head_stats.h"
#include "method/residual.h"

namespace fathom::cuda {
namespace {

constexpr std::int64_t kHalf = sizeof(Half);

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

void CheckMemory(const std::string& path, std::int64_t bytes) {
  const std::int64_t free = AvailableMemoryBytes();
  if (free == 0 || bytes <= free) return;
  throw Error(ErrorCode::kNoMemory,
              "the rows of capture '" + path + "' take " + std::to_string(bytes >> 20) +
                  " MiB of host memory, " + std::to_string(free >> 20) +
                  " MiB are free; capture fewer tokens or layers (fathom capture --layers)");
}

class CapturedKeys final : public BenchKeys {
 public:
  CapturedKeys(const StepSizes& sizes, std::shared_ptr<const CaptureData> data, cudaStream_t stream)
      : sizes_(sizes),
        data_(std::move(data)),
        stream_(stream),
        heads_(data_->rows().geometry()),
        n_tables_(std::min(sizes.heads.n_kv_heads, heads_.n_kv_heads)),
        tiling_{data_->n_blocks(), std::max<std::int64_t>(data_->n_blocks() / sizes.batch, 1)},
        backend_(MakeBackend("cpu", 0)),
        step_(Zeros<std::int32_t>(1, stream)) {
    context_.rows = &data_->rows();
    context_.backend = backend_.get();
    context_.queries = &data_->samples();
    for (std::int32_t set = 0; set < n_sets(); ++set) {
      queries_.push_back(OnDevice(data_->queries(set), stream));
    }
    Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  void Fill(std::int32_t layer, Half* const* rows, std::int64_t first, std::int64_t n,
            cudaStream_t stream) override {
    LoadRows(layer % n_sets());
    RepeatItems repeat = BlocksOf(sizes_, *this, rows_.data(), 2 * Dim() * kHalf);
    repeat.period *= kBlockTokens;  // token by token
    repeat.shift *= kBlockTokens;
    repeat.to = reinterpret_cast<std::byte* const*>(rows);
    repeat.first = first;
    repeat.n = n;
    Repeat(repeat, stream);
  }

  void FillValueMeans(std::int32_t layer, Half* means, std::int64_t n_blocks, float* mean_value,
                      cudaStream_t stream) override;

  std::int32_t n_sets() const override { return data_->n_layers(); }
  std::int32_t n_samples() const override { return n_tables_; }
  std::int32_t SampleOf(std::int32_t head) const override {
    return head % sizes_.heads.n_kv_heads % n_tables_;
  }
  SampleRows Sample(std::int32_t set, std::int32_t sample) override {
    return {data_->rows().rows(set, sample), data_->n_blocks()};
  }
  HeadStats Stats(std::int32_t set, std::int32_t sample, BasisRule rule, bool abs) override {
    return MeasureHead(context_, set, sample, data_->keys().n_tokens, rule, abs);
  }
  const Tiling* tiling() const override { return &tiling_; }

  std::vector<std::vector<float>> FitQueries() const override;

  void TakeStep(std::int32_t layer, const StepVectors& v, cudaStream_t stream) override {
    const std::int64_t position = std::int64_t{heads_.n_heads} * Dim();
    const std::int32_t set = layer % n_sets();
    TakeCaptured(
        {sizes_.n_heads(), sizes_.heads.n_kv_heads, sizes_.heads.group(), sizes_.heads.head_dim,
         queries_[Size(set)].data(),
         static_cast<std::int32_t>(data_->queries(set).size() / Size(position)), heads_.n_kv_heads,
         heads_.group(), step_.data(), v.recent, v.ring, v.positions, v.q, v.k, v.v},
        stream);
  }
  void NextStep(cudaStream_t stream) override { CountStep(step_.data(), stream); }

 private:
  std::int64_t Dim() const { return sizes_.heads.head_dim; }

  // Rows of a layer on the device, kept until another one is asked for.
  void LoadRows(std::int32_t set) {
    if (set == loaded_) return;
    const std::size_t head = Size(data_->keys().n_tokens * 2 * Dim());
    Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");  // readers of the last one
    rows_.Reserve(Size(n_tables_) * head);
    loaded_ = -1;
    for (std::int32_t h = 0; h < n_tables_; ++h) {
      CopyToDevice(rows_.data() + Size(h) * head, data_->rows().rows(set, h), head, stream_);
    }
    loaded_ = set;
  }

  const StepSizes sizes_;
  const std::shared_ptr<const CaptureData> data_;
  const cudaStream_t stream_;
  const HeadGeometry heads_;     // of the capture
  const std::int32_t n_tables_;  // of its KV heads, those that are used
  const Tiling tiling_;
  const std::unique_ptr<Backend> backend_;
  MethodContext context_;
  DeviceBuffer<std::int32_t> step_;
  std::vector<DeviceBuffer<float>> queries_;  // of every set
  DeviceBuffer<Half> rows_;                   // [n_tables_][tokens][2][D]
  std::int32_t loaded_ = -1;
};

// Blocks repeat, but for the first one of each sequence, whose sinks do not count.
void CapturedKeys::FillValueMeans(std::int32_t layer, Half* means, std::int64_t n_blocks,
                                  float* mean_value, cudaStream_t stream) {
  const std::int32_t set = layer % n_sets();
  const std::size_t dim = Size(Dim());
  std::vector<ValueMeans> values(Size(n_tables_),
                                 ValueMeans(sizes_.heads.head_dim, ResidualRule::kBlock));
  ParallelFor(n_tables_, backend_->n_threads(), [&](std::int64_t h) {
    values[Size(h)].MoveTo(data_->rows().rows(set, static_cast<std::int32_t>(h)),
                           data_->keys().n_tokens, 0);
  });
  std::vector<Half> table, first;
  for (const ValueMeans& of_head : values) {
    table.insert(table.end(), of_head.block_means(),
                 of_head.block_means() + tiling_.period * Dim());
  }
  std::vector<float> mean;
  for (std::int32_t h = 0; h < sizes_.n_heads(); ++h) {
    const std::int32_t sample = SampleOf(h);
    const std::int64_t block = h / sizes_.heads.n_kv_heads * tiling_.shift % tiling_.period;
    ValueMeans one(sizes_.heads.head_dim, ResidualRule::kBlock);
    one.MoveTo(data_->rows().rows(set, sample) + block * kBlockTokens * 2 * Dim(), kBlockTokens,
               kSinks);
    first.insert(first.end(), one.block_means(), one.block_means() + dim);
    const auto all = values[Size(sample)].mean();
    mean.insert(mean.end(), all.begin(), all.end());
  }
  const DeviceBuffer<Half> from = OnDevice(table, stream);
  const auto to = Pointers(means, sizes_.n_heads(), n_blocks * Dim());
  RepeatItems repeat = BlocksOf(sizes_, *this, from.data(), Dim() * kHalf);
  repeat.to = reinterpret_cast<std::byte* const*>(to.data());
  repeat.n = n_blocks;
  Repeat(repeat, stream);
  Check(cudaMemcpy2DAsync(means, Size(n_blocks) * dim * sizeof(Half), first.data(),
                          dim * sizeof(Half), dim * sizeof(Half), Size(sizes_.n_heads()),
                          cudaMemcpyHostToDevice, stream),
        "cudaMemcpy2DAsync to the device");
  CopyToDevice(mean_value, mean.data(), mean.size(), stream);
  Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

std::vector<std::vector<float>> CapturedKeys::FitQueries() const {
  const std::int32_t group = sizes_.heads.group();
  std::vector<std::vector<float>> queries;
  const std::int64_t n_steps = data_->samples().front().recent.size();
  for (std::int64_t step = 0; step < n_steps; ++step) {
    for (std::int32_t layer = 0; layer < sizes_.n_layers; ++layer) {
      const float* from = data_->samples()[Size(layer % n_sets())].recent.query(step);
      std::vector<float>& of_layer = queries.emplace_back();
      for (std::int32_t h = 0; h < sizes_.heads.n_kv_heads; ++h) {
        for (std::int32_t g = 0; g < group; ++g) {
          const std::int64_t head = h % n_tables_ * heads_.group() + g % heads_.group();
          of_layer.insert(of_layer.end(), from + head * Dim(), from + (head + 1) * Dim());
        }
      }
    }
  }
  return queries;
}

}  // namespace

RepeatItems BlocksOf(const StepSizes& sizes, const BenchKeys& keys, const void* from,
                     std::int64_t block_bytes) {
  RepeatItems items{};
  items.n_heads = sizes.n_heads();
  items.n_kv_heads = sizes.heads.n_kv_heads;
  items.from = static_cast<const std::byte*>(from);
  items.n_tables = keys.n_samples();
  items.n_rows = 1;
  items.period = keys.tiling()->period;
  items.shift = keys.tiling()->shift;
  items.item_bytes = block_bytes;
  return items;
}

CaptureData::CaptureData(const std::string& path, const StepShape& shape,
                         const ProgressFn& progress)
    : path_(path) {
  const CaptureFile capture(path);
  keys_ = DescribeStepKeys(capture, shape);
  const std::vector<std::int32_t>& held = capture.geometry().layers;
  const std::int32_t n_layers = std::min(shape.n_layers, static_cast<std::int32_t>(held.size()));
  const HeadGeometry& heads = capture.geometry().heads;
  CheckMemory(path, RowStore::Bytes(n_layers, heads, keys_.n_tokens));
  rows_ = std::make_unique<RowStore>(n_layers, heads, keys_.n_tokens);
  for (std::int32_t l = 0; l < n_layers; ++l) {
    const std::int32_t layer = held[Size(l)];
    LoadCaptureRows(capture, layer, keys_.n_tokens, l, rows_.get());
    queries_.push_back(capture.LoadQueries(layer));
    samples_.push_back(LoadCaptureSamples(capture, layer, keys_.n_tokens));
    if (progress) progress(l + 1, n_layers);
  }
  rows_->Commit(keys_.n_tokens);
}

std::unique_ptr<BenchKeys> MakeCapturedKeys(const StepSizes& sizes,
                                            std::shared_ptr<const CaptureData> data,
                                            cudaStream_t stream) {
  return std::make_unique<CapturedKeys>(sizes, std::move(data), stream);
}

}  // namespace fathom::cuda
