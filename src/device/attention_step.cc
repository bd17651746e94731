// SPDX-License-Identifier: MIT
#include "device/attention_step.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "backend/cuda/gather.h"
#include "backend/cuda/host_copy.h"
#include "backend/cuda/rest.h"
#include "backend/cuda/scan_mean.h"
#include "backend/cuda/select.h"
#include "backend/cuda/weigh.h"
#include "fathom/error.h"

namespace fathom::cuda {
namespace {

constexpr std::int32_t kCandidates = 8192;  // room of a list; 2 keep + 512 are expected
constexpr std::int64_t kMostSample = std::int64_t{128} * kTileTokens;
constexpr float kLeastShare = 1e-3F;  // of all mass, for a block's own mean value

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t RoundUp(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

std::int32_t KeepOf(const StepSizes& s, std::int32_t unit) {
  return static_cast<std::int32_t>(std::max<std::int64_t>((s.k - kAlwaysKept) / unit, 1));
}

void CheckSizes(const StepSizes& s, std::int32_t unit) {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kUsage, what); };
  if (s.heads.group() < 1 || s.heads.group() > kMaxGroup) {
    fail("query heads per KV head: " + std::to_string(s.heads.group()) + "; the kernels take 1.." +
         std::to_string(kMaxGroup));
  }
  if (s.heads.head_dim % 16 != 0 || s.heads.head_dim > kMaxHeadDim || s.heads.head_dim < 16) {
    fail("head_dim " + std::to_string(s.heads.head_dim) + "; the kernels take multiples of 16 to " +
         std::to_string(kMaxHeadDim));
  }
  if (s.max_tokens < 1 || s.max_tokens >= std::int64_t{1} << 30) {
    fail("context of " + std::to_string(s.max_tokens) + " tokens; the device takes 1 to 2^30 - 1");
  }
  if (s.n_heads() > kMostHeads) {
    fail("batch of " + std::to_string(s.batch) + " with " + std::to_string(s.heads.n_kv_heads) +
         " KV heads; the device takes " + std::to_string(kMostHeads) + " of them together");
  }
  constexpr std::int32_t kMostKeep = 3584;
  static_assert(2 * kMostKeep + 8 * kBlockTokens <= kCandidates * 15 / 16);
  if (KeepOf(s, unit) > kMostKeep) {
    fail("k=" + std::to_string(s.k) + "; the device selects at most " +
         std::to_string(kMostKeep * unit) + " per query head");
  }
}

}  // namespace

AttentionStep::AttentionStep(const StepSizes& sizes, std::int32_t unit_tokens)
    : sizes_(sizes), unit_(unit_tokens) {
  CheckSizes(sizes, unit_);
  const std::int64_t lists = sizes.n_lists(), heads = sizes.n_heads();
  const std::int32_t group = sizes.heads.group(), dim = sizes.heads.head_dim;
  max_keep_ = KeepOf(sizes, unit_);
  score_stride_ = RoundUp(sizes.max_tokens / unit_ + 1, kTileTokens);
  // Samples are not larger than this; see IndexScan::sample_step.
  sample_stride_ = std::max(std::min(score_stride_ / 4 + kTileTokens, kMostSample),
                            RoundUp(score_stride_ / kMeanSampleStep, kTileTokens));
  rest_stride_ = RoundUp(sizes.max_tokens / kBlockTokens + 1, kTileBlocks);

  const auto batch = Size(sizes.batch);
  lengths_.Reserve(3 * batch);
  least_.Reserve(Size(lists));
  sample_.Reserve(Size(lists * sample_stride_));
  scores_.Reserve(Size(lists * score_stride_));
  cut_.Reserve(Size(lists));
  counters_.Reserve(Size(lists + heads));
  count_ = counters_.data();
  redo_ = counters_.data() + lists;
  keys_.Reserve(Size(lists * kCandidates));
  kth_key_.Reserve(Size(lists));
  winners_.Reserve(Size(lists * max_keep_));
  if (sizes.residual) rest_.Reserve(Size(lists * rest_stride_));

  const std::int64_t max_tokens = RoundUp(sizes.max_tokens, 128);
  bitmap_.Reserve(Size(heads * max_tokens / 32));
  masks_.Reserve(Size(heads * max_tokens));
  Check(cudaMemset(bitmap_.data(), 0, bitmap_.size() * sizeof(std::uint32_t)), "cudaMemset");
  Check(cudaMemset(masks_.data(), 0, masks_.size() * sizeof(std::uint16_t)), "cudaMemset");
  counts_.Reserve(Size(2 * sizes.n_layers * heads));
  Check(cudaMemset(counts_.data(), 0, counts_.size() * sizeof(std::int32_t)), "cudaMemset");
  Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  const std::int64_t always = 2 * kBlockTokens + kWindow + 8;
  attended_.capacity = static_cast<std::int32_t>(
      std::min(RoundUp(std::int64_t{group} * max_keep_ * unit_ + always, 64), max_tokens));
  tokens_.Reserve(Size(heads * attended_.capacity));
  token_masks_.Reserve(Size(heads * attended_.capacity));
  attended_.tokens = tokens_.data();
  attended_.mask = token_masks_.data();
  attended_.count = counts_.data();

  staged_.Reserve(Size(heads * attended_.capacity * 2 * dim));
  n_splits_ = AttendSplits(static_cast<std::int32_t>(heads), attended_.capacity);
  dense_splits_ = AttendSplits(static_cast<std::int32_t>(heads), sizes.max_tokens);
  const std::int64_t most_splits = std::max(n_splits_, dense_splits_);
  part_out_.Reserve(Size(lists * most_splits * dim));
  part_.Reserve(Size(lists * most_splits));
  lse_.Reserve(Size(lists));
  unit_mass_.Reserve(Size(lists));
  mass_.Reserve(Size(lists));
  least_mass_.Reserve(Size(lists));
  weigh_splits_ = WeighSplits(static_cast<std::int32_t>(heads), rest_stride_);
  weigh_out_.Reserve(Size(lists * weigh_splits_ * dim));
  weigh_other_.Reserve(Size(lists * weigh_splits_));
}

Candidates AttentionStep::candidates() const {
  return {keys_.data(), count_, kCandidates, least_.data()};
}

float AttentionStep::exp_scale() const {
  return 1.0F / std::sqrt(static_cast<float>(sizes_.heads.head_dim));
}

StepLengths AttentionStep::LengthsOf(std::int64_t n_tokens, std::int64_t n_blocks,
                                     bool dense) const {
  const auto n = static_cast<std::int32_t>(n_tokens), blocks = static_cast<std::int32_t>(n_blocks);
  // Chunks that hold a sink, or a token of window or tail, are attended anyhow.
  const std::int32_t first = (kSinks + unit_ - 1) / unit_;
  const std::int32_t last = std::max(0, std::min(n - kWindow, blocks * kBlockTokens)) / unit_;
  const bool sparse = !dense && n > sizes_.k && last - first >= max_keep_;
  const std::int32_t keep = sparse ? max_keep_ : 0;
  const std::int32_t unit_blocks = (blocks + unit_ - 1) / unit_;
  return {{n, blocks, first * unit_, last * unit_, keep},
          {n / unit_, unit_blocks, first, last, keep},
          {n, blocks, first * unit_, last * unit_, 0}};
}

void AttentionStep::CopyLengths(const Lengths* lengths, cudaStream_t stream) {
  CopyToDevice(lengths_.data(), lengths, Size(3 * sizes_.batch), stream);
}

void AttentionStep::SetLengths(std::span<const std::int64_t> n_tokens, bool dense,
                               cudaStream_t stream) {
  const std::size_t batch = n_tokens.size();
  std::vector<Lengths> all(3 * batch);
  for (std::size_t i = 0; i < batch; ++i) {
    const StepLengths of = LengthsOf(n_tokens[i], n_tokens[i] / kBlockTokens, dense);
    all[i] = of.tokens;
    all[batch + i] = of.units;
    all[2 * batch + i] = of.dense;
  }
  CopyLengths(all.data(), stream);
  Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void AttentionStep::ClearCounts(cudaStream_t stream) {
  Check(cudaMemsetAsync(counts_.data(), 0, counts_.size() * sizeof(std::int32_t), stream),
        "cudaMemsetAsync");
}

void AttentionStep::Choose(std::int32_t layer, IndexScan* index, const StageFn& on_stage,
                           cudaStream_t stream) {
  const std::int32_t group = sizes_.heads.group(), n_kv = sizes_.heads.n_kv_heads;
  const std::int32_t lists = sizes_.n_lists();
  const RestSink rest_sink{has_rest(index) ? rest_.data() : nullptr, rest_stride_, exp_scale()};

  const std::int32_t step =
      index->sample_step(static_cast<std::int32_t>(score_stride_ / kTileTokens));
  index->Scan(layer, {sample_.data(), sample_stride_, step, nullptr, {}}, {}, stream);
  FindLimits({sample_.data(), sample_stride_, step, group, n_kv, lists, scan_lengths(),
              least_.data(), count_, redo_},
             stream);
  index->Scan(layer, {nullptr, 0, 1, nullptr, candidates()}, rest_sink, stream);
  if (on_stage) on_stage(layer, Stage::kScan);
  Select(SelectCandidates{candidates(), group, n_kv, lists, scan_lengths(), max_keep_,
                          winners_.data(), kth_key_.data(), cut_.data(), redo_},
         stream);
  index->Scan(layer, {scores_.data(), score_stride_, 1, redo_, {}}, {}, stream);
  Select(SelectScores{scores_.data(), score_stride_, group, n_kv, lists, scan_lengths(), max_keep_,
                      winners_.data(), kth_key_.data(), cut_.data(), redo_},
         stream);
}

// After the gather of rows has been launched, which it runs beside.
void AttentionStep::FinishRest(cudaStream_t stream) {
  const std::int32_t group = sizes_.heads.group(), n_kv = sizes_.heads.n_kv_heads;
  const std::int32_t lists = sizes_.n_lists();
  CorrectRest({candidates(), kth_key_.data(), exp_scale(), group, n_kv, lists, scan_lengths(),
               redo_, rest_.data(), rest_stride_, cut_.data(), /*beside_gather=*/true},
              stream);
  SumRest({scores_.data(), score_stride_, kth_key_.data(), exp_scale(), group, n_kv, lists,
           scan_lengths(), static_cast<std::int32_t>(rest_stride_), redo_, rest_.data(),
           rest_stride_, cut_.data(), /*beside_gather=*/true},
          stream);
}

void AttentionStep::AttendRowsOf(std::int32_t layer, const IndexScan* index, const LayerRows& rows,
                                 const float* q, float* out, cudaStream_t stream,
                                 const StageFn& on_stage) {
  const HeadGeometry& heads = sizes_.heads;
  const std::int32_t group = heads.group(), n_heads = sizes_.n_heads();
  const std::int32_t n_splits = index == nullptr ? dense_splits_ : n_splits_;
  const float scale = exp_scale();
  Gather(
      GatherRows{heads.head_dim, n_heads, heads.n_kv_heads, rows.source, attended_, staged_.data()},
      stream);
  if (has_rest(index)) FinishRest(stream);
  if (on_stage) on_stage(layer, Stage::kRows);
  Attend(AttendRows{.head_dim = heads.head_dim,
                    .group = group,
                    .n_heads = n_heads,
                    .n_kv_heads = heads.n_kv_heads,
                    .scale = scale,
                    .staged = staged_.data(),
                    .source = rows.source,
                    .attended = attended_,
                    .lengths = LengthsFor(index),
                    .q = q,
                    .limit = nullptr,
                    .n_values = nullptr,
                    .n_splits = n_splits,
                    .part_out = part_out_.data(),
                    .part = part_.data()},
         stream);
  const bool rest = has_rest(index) && rows.value_means != nullptr;
  RestMass mass{};
  if (rest) {
    mass = {rest_.data(), rest_stride_,      scan_lengths(), attended_.count,
            cut_.data(),  index->offset(),   index->noise(), scale,
            kLeastShare,  unit_mass_.data(), mass_.data(),   least_mass_.data()};
  }
  Merge(MergeParts{heads.head_dim, group, n_heads, heads.n_kv_heads, n_splits, part_out_.data(),
                   part_.data(), nullptr, out, lse_.data(), mass},
        stream);
  if (rest) {
    Weigh(WeighBlocks{heads.head_dim,
                      group,
                      n_heads,
                      heads.n_kv_heads,
                      rows.value_means,
                      rows.mean_value,
                      rest_.data(),
                      rest_stride_,
                      least_mass_.data(),
                      scan_lengths(),
                      weigh_splits_,
                      weigh_out_.data(),
                      weigh_other_.data(),
                      counts_.data() + Size((sizes_.n_layers + layer) * n_heads),
                      {unit_mass_.data(), mass_.data(), rows.factor},
                      out},
          stream);
  }
  if (on_stage) on_stage(layer, Stage::kAttend);
}

void AttentionStep::Run(std::int32_t layer, IndexScan* index, const LayerRows& rows, const float* q,
                        float* out, cudaStream_t stream, const StageFn& on_stage) {
  attended_.count = counts_.data() + Size(layer * sizes_.n_heads());
  const auto done = [&](Stage stage) {
    if (on_stage) on_stage(layer, stage);
  };
  if (index != nullptr) {
    index->Plan(layer, q, stream);
    done(Stage::kPlan);
    index->Fetch(layer, stream);
    done(Stage::kFetch);
    Choose(layer, index, on_stage, stream);
  }
  Join(JoinWinners{winners_.data(), max_keep_, unit_, sizes_.heads.group(), sizes_.heads.n_kv_heads,
                   sizes_.n_lists(), LengthsFor(index), bitmap_.data(), masks_.data(),
                   static_cast<std::int64_t>(bitmap_.size()) / sizes_.n_heads(),
                   static_cast<std::int64_t>(masks_.size()) / sizes_.n_heads(), attended_},
       stream);
  done(Stage::kSelect);
  AttendRowsOf(layer, index, rows, q, out, stream, on_stage);
}

}  // namespace fathom::cuda
