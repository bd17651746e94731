// SPDX-License-Identifier: MIT
#include "device/session_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "backend/cuda/append_rows.h"
#include "backend/cuda/host_copy.h"
#include "fathom/error.h"

namespace fathom::cuda {
namespace {

// Recent rows in device memory. Sessions that are shorter need no others, which is what the
// methods' default of `min` leaves dense.
constexpr std::int32_t kRing = 1024;

static_assert(offsetof(MeanTableHead, n_planes) == 0 && offsetof(MeanTableHead, n_channels) == 8);

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

StepSizes SizesOf(const RowStore& rows) {
  StepSizes sizes;
  sizes.heads = rows.geometry();
  sizes.n_layers = rows.n_layers();
  sizes.max_tokens = rows.capacity();
  return sizes;
}

}  // namespace

SessionAttention::SessionAttention(RowStore* rows, int n_threads, HostPinner pinner)
    : rows_(rows),
      n_threads_(n_threads),
      pins_(std::move(pinner)),
      place_(kPlaceNumbers),
      host_place_(kPlaceNumbers),
      host_lengths_(3),
      host_counts_(Size(2 * HeadAt(rows->n_layers()))),
      host_read_(Size(HeadAt(rows->n_layers()))) {}

void SessionAttention::RegisterRows() {
  if (std::exchange(registers_, true)) return;
  const HeadGeometry& heads = rows_->geometry();
  try {
    CheckHostMemory(
        RowStore::Bytes(rows_->n_layers(), heads, rows_->capacity()) - rows_->MemoryBytes(),
        "rows of the whole context, which the device reads,", "choose a shorter context (-c)");
  } catch (const Error& error) {
    no_rows_ = error.what();
    return;
  }
  const std::int64_t bytes =
      RowStore::Bytes(1, {heads.group(), 1, heads.head_dim}, WholeBlocks(rows_->capacity()));
  for (std::int32_t layer = 0; layer < rows_->n_layers(); ++layer) {
    for (std::int32_t h = 0; h < heads.n_kv_heads; ++h) {
      pins_.Add(reinterpret_cast<std::byte*>(rows_->rows(layer, h)), bytes);
    }
  }
}

void SessionAttention::Forget() {
  resident_ = -1;
  stale_ = true;
  refusal_.clear();
}

std::string SessionAttention::Prepare(StepSource& source, std::int64_t n_tokens) {
  if (!refusal_.empty()) return refusal_;
  bool scans = source.Scans(n_tokens + 1);
  if (scans) {
    if (std::string why = source.Refusal(); !why.empty()) return why;
  }
  RegisterRows();
  if (no_rows_.empty()) no_rows_ = pins_.Wait();
  if (!no_rows_.empty()) {
    pins_.Release();
    return no_rows_;
  }
  try {
    if (std::string why = PrepareScan(source, n_tokens, &scans); !why.empty()) return why;
    if (resident_ != n_tokens) LoadResident(n_tokens);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInternal) throw;
    resident_ = -1;
    step_.reset();
    planes_.reset();
    values_.reset();
    return refusal_ = error.what();
  }
  scans_ = scans;
  recipe_ = recipes_[scans ? 1 : 0];
  n_tokens_ = n_tokens + 1;
  const StepLengths lengths =
      step_->LengthsOf(n_tokens_, n_tokens / kBlockTokens, /*dense=*/!scans);
  host_lengths_.data()[0] = lengths.tokens;
  host_lengths_.data()[1] = lengths.units;
  host_lengths_.data()[2] = lengths.dense;
  host_place_.data()[0] = static_cast<std::int32_t>(n_tokens);
  host_place_.data()[1] = static_cast<std::int32_t>(std::max<std::int64_t>(n_tokens_ - kRing, 0));
  resident_ = -1;  // until the step has been made
  return {};
}

// Step and mirrors for a step that scans, or is dense; *scans becomes false where the blocks that
// are finished hold no more than winners.
std::string SessionAttention::PrepareScan(StepSource& source, std::int64_t n_tokens, bool* scans) {
  const std::int64_t n_blocks = n_tokens / kBlockTokens;
  const StepSource::Rules rules = source.rules();
  if (*scans) {
    const std::int64_t last = std::min(n_blocks * kBlockTokens, n_tokens + 1 - kWindow);
    *scans = last - kSinks > rules.k - kAlwaysKept;
  }
  const bool same = step_ != nullptr && rules.k == rules_.k && rules.residual == rules_.residual &&
                    rules.dense_layers == rules_.dense_layers;
  if (*scans ? !same || !can_scan_ : step_ == nullptr) MakeStep(rules, *scans);
  if (!*scans) return {};
  if (!stale_ && planes_ != nullptr && planes_->n_blocks() == n_blocks &&
      source.version() == version_) {
    return {};
  }
  source.CatchUp(n_tokens);
  if (std::string why = source.Refusal(); !why.empty()) return why;  // it has seen the queries now
  const IndexShape& shape = source.plane_head(rules.dense_layers, 0).index->shape();
  if (planes_ == nullptr || planes_->shape().mean_bits != shape.mean_bits) {
    planes_.reset();  // before the new one, to bound the memory
    planes_ = std::make_unique<PlaneMirror>(SizesOf(*rows_), rules.dense_layers, shape,
                                            step_->scan_lengths());
    recipes_[1] = ++last_recipe_;
  }
  if (planes_->Sync(source, n_blocks, n_threads_, stream_.get())) recipes_[1] = ++last_recipe_;
  if (values_ != nullptr) {
    const std::int64_t kept = source.version() == version_ ? value_blocks_ : 0;
    values_->Sync(source, std::min(kept, n_blocks), n_blocks, stream_.get());
    value_blocks_ = n_blocks;
  }
  version_ = source.version();
  stale_ = false;
  return {};
}

// scans: for steps that scan by these rules; else k does not matter and is small.
void SessionAttention::MakeStep(const StepSource::Rules& rules, bool scans) {
  planes_.reset();  // it refers to the step
  values_.reset();
  step_.reset();
  stale_ = true;
  value_blocks_ = 0;
  StepSizes sizes = SizesOf(*rows_);
  sizes.k = scans ? rules.k : kAlwaysKept + 1;
  sizes.residual = scans && rules.residual != ResidualRule::kOff;
  step_ = std::make_unique<AttentionStep>(sizes, 1);
  if (sizes.residual) {
    values_ = std::make_unique<ValueMirror>(sizes, rules.dense_layers, rules.residual);
  }
  rules_ = rules;
  can_scan_ = scans;
  recipes_[0] = ++last_recipe_;
  recipes_[1] = ++last_recipe_;
}

// Sinks and the last kRing rows of n_tokens.
void SessionAttention::LoadResident(std::int64_t n_tokens) {
  const HeadGeometry& heads = rows_->geometry();
  const std::int64_t n_heads = HeadAt(rows_->n_layers()), row = std::int64_t{2} * heads.head_dim;
  if (row_lists_.size() == 0) {
    std::vector<Half*> lists;
    for (std::int32_t layer = 0; layer < rows_->n_layers(); ++layer) {
      for (std::int32_t h = 0; h < heads.n_kv_heads; ++h) lists.push_back(rows_->rows(layer, h));
    }
    sinks_.Reserve(Size(n_heads * kSinks * row));
    ring_.Reserve(Size(n_heads * kRing * row));
    row_lists_ = DeviceBuffer<Half*>(std::span<Half* const>(lists));
    recipes_[0] = ++last_recipe_;
    recipes_[1] = ++last_recipe_;
  }
  std::vector<Half> ring(Size(heads.n_kv_heads * kRing * row));
  std::vector<Half> sinks(Size(heads.n_kv_heads * kSinks * row));
  for (std::int32_t layer = 0; layer < rows_->n_layers(); ++layer) {
    for (std::int32_t h = 0; h < heads.n_kv_heads; ++h) {
      const Half* from = std::as_const(*rows_).rows(layer, h);
      for (std::int64_t i = std::max<std::int64_t>(n_tokens - kRing, 0); i < n_tokens; ++i) {
        std::copy_n(from + i * row, row, ring.data() + (h * kRing + i % kRing) * row);
      }
      std::copy_n(from, std::min<std::int64_t>(n_tokens, kSinks) * row,
                  sinks.data() + h * kSinks * row);
    }
    const std::int64_t at = HeadAt(layer) * row;
    CopyToDevice(ring_.data() + at * kRing, ring.data(), ring.size(), stream_.get());
    CopyToDevice(sinks_.data() + at * kSinks, sinks.data(), sinks.size(), stream_.get());
    stream_.Wait();  // the staging area is written again
  }
  resident_ = n_tokens;
}

LayerRows SessionAttention::RowsOf(std::int32_t layer) const {
  const std::int64_t at = HeadAt(layer) * 2 * rows_->geometry().head_dim;
  LayerRows rows;
  rows.source = {
      row_lists_.data() + HeadAt(layer),
      nullptr,
      {sinks_.data() + at * kSinks, ring_.data() + at * kRing, kRing, place_.data() + 1}};
  if (scans_ && values_ != nullptr && layer >= rules_.dense_layers) values_->Fill(layer, &rows);
  return rows;
}

void SessionAttention::Begin(cudaStream_t stream) {
  step_->CopyLengths(host_lengths_.data(), stream);
  CopyToDevice(place_.data(), host_place_.data(), kPlaceNumbers, stream);
  step_->ClearCounts(stream);
}

void SessionAttention::Layer(std::int32_t layer, const float* q, const float* k, const float* v,
                             float* out, cudaStream_t stream) {
  const HeadGeometry& heads = rows_->geometry();
  const std::int64_t at = HeadAt(layer) * 2 * heads.head_dim;
  Append({heads.n_kv_heads, heads.n_kv_heads, heads.head_dim, k, v, place_.data(),
          sinks_.data() + at * kSinks, ring_.data() + at * kRing, kRing,
          row_lists_.data() + HeadAt(layer), 0},
         stream);
  IndexScan* scan = scans_ && layer >= rules_.dense_layers ? planes_->scan() : nullptr;
  step_->Run(layer, scan, RowsOf(layer), q, out, stream);
}

void SessionAttention::End(cudaStream_t stream) {
  CopyToHost(host_counts_.data(), step_->counts(), host_counts_.size(), stream);
  if (!scans_) return;
  const std::int64_t first = HeadAt(rules_.dense_layers);
  const std::size_t pitch = sizeof(MeanTableHead) * Size(planes_->n_codecs());
  Check(cudaMemcpy2DAsync(host_read_.data() + first, sizeof(Read),
                          planes_->heads() + first * planes_->n_codecs(), pitch, sizeof(Read),
                          Size(HeadAt(rows_->n_layers()) - first), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpy2DAsync");
}

// As SparseMethod::Attend and AttendDense count.
void SessionAttention::CountLayer(std::int32_t layer, MethodCounters* counters) const {
  const HeadGeometry& heads = rows_->geometry();
  const bool scans = scans_ && layer >= rules_.dense_layers;
  counters->calls += heads.n_kv_heads;
  counters->sparse_calls += scans ? heads.n_kv_heads : 0;
  double bits = 0;
  for (std::int64_t h = HeadAt(layer); h < HeadAt(layer + 1); ++h) {
    const std::int64_t count = host_counts_.data()[h];
    const std::int64_t rows = count < 0 ? n_tokens_ : count;
    counters->rows += rows;
    counters->value_rows += rows;
    counters->row_bytes += rows * 4 * heads.head_dim;
    if (!scans) continue;
    const Read& read = host_read_.data()[h];
    bits += read.n_planes +
            read.n_channels * static_cast<double>(planes_->shape().mean_bits) / kBlockTokens;
    counters->value_mean_bytes +=
        std::int64_t{host_counts_.data()[HeadAt(rows_->n_layers()) + h]} * 2 * heads.head_dim;
  }
  counters->read_bits += bits;
  const std::int64_t indexed = (n_tokens_ - 1) / kBlockTokens * kBlockTokens;
  counters->index_bytes += std::llround(bits * static_cast<double>(indexed) / 8);
}

void SessionAttention::Finish(StepSource& source) {
  MethodCounters counters;
  counters.steps = 1;
  for (std::int32_t layer = 0; layer < rows_->n_layers(); ++layer) CountLayer(layer, &counters);
  source.Count(counters);
  resident_ = n_tokens_;
}

}  // namespace fathom::cuda
