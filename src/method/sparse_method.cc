// SPDX-License-Identifier: MIT
#include "method/sparse_method.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "backend/rest.h"
#include "method/head_stats.h"
#include "plan/sums.h"

namespace fathom {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;  // token indices are 32-bit
// What values=lazy leaves out, as a share of a head's attention.
constexpr float kLeastWeight = 1e-4F;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// At most one struct per KV head and layer; geometry is checked by RowStore.
template <typename HeadStruct>
std::vector<HeadStruct>& HeadScratch(std::size_t n) {
  thread_local std::vector<HeadStruct> heads;
  heads.assign(n, HeadStruct{});
  return heads;
}

// Only grows: warm steps then touch no allocator.
template <typename T>
void Grow(std::vector<T>* scratch, std::size_t n) {
  if (scratch->size() < n) scratch->resize(n);
}

}  // namespace

SparseConfig ReadSparseConfig(OptionReader& options, const char* residual) {
  SparseConfig config;
  config.k = options.Int("k", config.k, kAlwaysKept + 1, kMaxTokens);
  config.min = options.Int("min", config.min, 0, kMaxTokens);
  config.dense_layers = static_cast<std::int32_t>(options.Int("dense", 0, 0, 1 << 20));
  if (residual != nullptr) {
    const std::string rule = options.Choice("residual", residual, {"off", "mean", "block"});
    config.residual = rule == "off"    ? ResidualRule::kOff
                      : rule == "mean" ? ResidualRule::kMean
                                       : ResidualRule::kBlock;
    const bool lazy = options.Choice("values", "all", {"all", "lazy"}) == "lazy";
    config.least_weight = lazy ? kLeastWeight : 0;
  }
  return config;
}

std::int64_t SparseIndexBytes(const SparseConfig& config, const HeadGeometry& geometry,
                              std::int64_t n_tokens, std::int64_t index_bytes) {
  if (n_tokens < config.min) return 0;
  return index_bytes + ValueMeans::Bytes(geometry.head_dim, config.residual,
                                         n_tokens / kBlockTokens * kBlockTokens);
}

void AttendDense(const MethodContext& context, std::int32_t layer, std::int64_t n_tokens,
                 const float* q, float* out, MethodCounters* counters) {
  const HeadGeometry& geometry = context.rows->geometry();
  const std::size_t head_floats = Size(geometry.group()) * Size(geometry.head_dim);
  thread_local std::vector<float> lse;
  lse.resize(Size(geometry.n_heads));
  auto& heads = HeadScratch<AttendHead>(Size(geometry.n_kv_heads));
  for (std::size_t h = 0; h < heads.size(); ++h) {
    heads[h].rows = context.rows->rows(layer, static_cast<std::int32_t>(h));
    heads[h].q = q + h * head_floats;
    heads[h].n_attended = n_tokens;
    heads[h].out = out + h * head_floats;
    heads[h].lse = lse.data() + h * Size(geometry.group());
  }
  counters->rows += n_tokens * geometry.n_kv_heads;
  counters->value_rows += n_tokens * geometry.n_kv_heads;
  counters->row_bytes += n_tokens * geometry.n_kv_heads * 4 * geometry.head_dim;
  context.backend->Attend({geometry.head_dim, geometry.group(),
                           1.0F / std::sqrt(static_cast<float>(geometry.head_dim)), heads});
}

SparseMethod::SparseMethod(const MethodContext& context, SparseConfig config, std::string spec)
    : context_(context),
      config_(config),
      spec_(std::move(spec)),
      factor_(Size(n_layers()) * Size(geometry().n_heads)),
      fitted_(Size(n_layers())),
      attended_(Size(geometry().n_kv_heads), -1) {
  const bool block = config_.residual == ResidualRule::kBlock;
  if (config_.residual != ResidualRule::kOff || config_.least_weight > 0) {
    values_.assign(
        Size(n_layers()) * Size(geometry().n_kv_heads),
        ValueMeans(geometry().head_dim, block ? ResidualRule::kBlock : ResidualRule::kMean));
  }
}

float SparseMethod::scale() const {
  return 1.0F / std::sqrt(static_cast<float>(geometry().head_dim));
}

SparseMethod::Step SparseMethod::StepAt(std::int32_t layer, std::int64_t n_tokens) const {
  const std::int64_t n_index = n_tokens / kBlockTokens * kBlockTokens;
  return {layer, n_tokens, n_index, std::min(n_index, n_tokens - kWindow),
          config_.k - kAlwaysKept + ExtraKept()};
}

bool SparseMethod::IsSparse(const Step& step) const {
  return step.layer >= config_.dense_layers && step.n_tokens > config_.k &&
         step.n_tokens >= config_.min && step.last - kSinks > step.keep;
}

void SparseMethod::Attend(std::int32_t layer, std::int64_t n_tokens, const float* q, float* out) {
  const HeadGeometry& heads = geometry();
  if (layer == 0) ++counters_.steps;
  counters_.calls += heads.n_kv_heads;
  const Step step = StepAt(layer, n_tokens);
  if (!IsSparse(step)) {
    std::ranges::fill(attended_, -1);
    AttendDense(context_, layer, n_tokens, q, out, &counters_);
    return;
  }
  max_tokens_ = std::max(max_tokens_, n_tokens);
  ExtendIndex(layer, n_tokens);
  if (config_.residual != ResidualRule::kOff && fitted_[Size(layer)] == 0) {
    FitResidual(layer, n_tokens);
  }
  const std::span<const float> factor(factor_.data() + Size(layer) * Size(heads.n_heads),
                                      Size(heads.n_heads));
  const bool rest = config_.residual != ResidualRule::kOff &&
                    std::ranges::any_of(factor, [](float f) { return f != 0.0F; });
  const double bits = AttendStep(step, q, rest ? factor : std::span<const float>(), out);
  counters_.sparse_calls += heads.n_kv_heads;
  counters_.read_bits += bits;
  counters_.index_bytes += std::llround(bits * static_cast<double>(step.n_index) / 8);
  for (std::size_t h = 0; h < attended_.size(); ++h) {
    counters_.rows += attended_[h];
    counters_.value_rows += n_values_[h];
    counters_.row_bytes += (attended_[h] + n_values_[h]) * 2 * heads.head_dim;
  }
  if (rest) {
    for (const std::int64_t n : means_read_) counters_.value_mean_bytes += n * 2 * heads.head_dim;
  }
  Observe(layer, n_tokens, q);
}

// Attention over what is selected, and, with factors [n_heads], over the rest, which is left in
// rest_ and rest_mass_. Returns the read bits.
double SparseMethod::AttendStep(const Step& step, const float* q, std::span<const float> factor,
                                float* out) {
  offset_.assign(Size(geometry().n_heads), 0.0F);
  noise_.assign(offset_.size(), 0.0F);
  if (!factor.empty()) {
    rest_.resize(offset_.size() * Size(geometry().head_dim));
    rest_mass_.resize(offset_.size());
    means_read_.resize(Size(geometry().n_kv_heads));
  }
  if (ranks()) return RankAttend(step, q, factor, out);
  const double bits = SelectStep(step, q);
  context_.backend->Attend({geometry().head_dim, geometry().group(), scale(),
                            AttendHeads(step, q, out), config_.least_weight});
  if (factor.empty()) return bits;
  MeasureRest(step, q);
  const std::size_t dim = Size(geometry().head_dim);
  for (std::size_t h = 0; h < factor.size(); ++h) {
    AddRest(out + h * dim, rest_.data() + h * dim, rest_mass_[h], factor[h], geometry().head_dim);
  }
  return bits;
}

LayerScores SparseMethod::ScoreBuffers() {
  const auto stride = static_cast<std::int64_t>(scores_.size() / Size(geometry().n_heads));
  return {scores_.data(), stride, offset_.data(), noise_.data()};
}

double SparseMethod::SelectStep(const Step& step, const float* q) {
  const std::size_t n_heads = Size(geometry().n_heads);
  const std::int64_t indexed = max_tokens_ / kBlockTokens * kBlockTokens;
  if (scores_.size() < n_heads * Size(indexed)) {
    scores_.resize(n_heads * Size(indexed + indexed / 4));
  }
  const double bits = ScoreLayer(step.layer, step.n_tokens, step.n_index, q, ScoreBuffers());
  if (group_rule() != GroupRule::kPerHead) Share(step);
  Select(step);
  return bits;
}

// One score per KV head out of those of its query heads.
void SparseMethod::Share(const Step& step) {
  const std::size_t n_kv = Size(geometry().n_kv_heads);
  const std::size_t group = Size(geometry().group());
  const std::size_t stride = scores_.size() / (n_kv * group);
  Grow(&shared_, n_kv * stride);
  const float s = scale();
  for (std::size_t kv = 0; kv < n_kv; ++kv) {
    float* shared = shared_.data() + kv * stride;
    const bool sum = group_rule() == GroupRule::kSumScores;
    std::fill_n(shared, Size(step.n_index), sum ? 0.0F : -kInfinity);
    for (std::size_t h = 0; h < group; ++h) {
      const float* score = scores_.data() + (kv * group + h) * stride;
      float shift = 0;
      if (!sum) {  // log softmax: heads are compared in probability
        float top = -kInfinity;
        for (std::int64_t i = 0; i < step.n_index; ++i) {
          if (std::isfinite(score[i])) top = std::max(top, score[i]);
        }
        double total = 0;
        for (std::int64_t i = 0; i < step.n_index; ++i) {
          if (std::isfinite(score[i])) total += std::exp((score[i] - top) * s);
        }
        shift = top + static_cast<float>(std::log(total)) / s;
      }
      for (std::int64_t i = 0; i < step.n_index; ++i) {
        shared[i] = sum ? shared[i] + score[i] : std::max(shared[i], score[i] - shift);
      }
    }
  }
}

// group: lists of winners of a KV head.
void SparseMethod::ReserveLists(const Step& step, std::size_t group) {
  const std::size_t n_kv = Size(geometry().n_kv_heads);
  const std::size_t always = Size(step.n_tokens - step.last + kSinks);
  capacity_ = always + std::min(group * Size(step.keep), Size(step.last - kSinks));
  if (tokens_.size() < n_kv * capacity_) {
    tokens_.resize(n_kv * (capacity_ + kBlockTokens));
    mask_.resize(tokens_.size());
  }
}

// AttendStep in one call of the backend.
double SparseMethod::RankAttend(const Step& step, const float* q, std::span<const float> factor,
                                float* out) {
  const HeadGeometry& heads = geometry();
  const std::size_t group = Size(heads.group());
  ReserveLists(step, group);
  auto& rank = HeadScratch<RankHead>(Size(heads.n_kv_heads));
  RankAttendArgs args;
  PrepareRank(step.layer, q, {nullptr, 0, offset_.data(), noise_.data()}, &args.rank, rank);
  left_stride_ = 0;
  for (const SegmentView& segment : rank[0].segments) left_stride_ += segment.n_blocks;
  const bool rest = !factor.empty();
  if (rest) {
    Grow(&left_, Size(heads.n_heads) * Size(left_stride_));
    cut_.resize(Size(heads.n_heads));
  }
  for (std::size_t h = 0; h < rank.size(); ++h) {
    rank[h].tokens = tokens_.data() + h * capacity_;
    rank[h].mask = mask_.data() + h * capacity_;
    rank[h].n_attended = &attended_[h];
    rank[h].rest = rest ? left_.data() + h * group * Size(left_stride_) : nullptr;
    rank[h].rest_stride = left_stride_;
    rank[h].cut = rest ? cut_.data() + h * group : nullptr;
  }
  args.rank.head_dim = heads.head_dim;
  args.rank.group = heads.group();
  args.rank.first = kSinks;
  args.rank.last = step.last;
  args.rank.n_tokens = step.n_tokens;
  args.rank.keep = step.keep;
  args.rank.exp_scale = rest ? scale() : 0;
  args.rank.heads = rank;
  args.attend = AttendHeads(step, q, out);
  args.scale = scale();
  args.least_weight = config_.least_weight;
  args.least_share = kLeastBlockShare;
  if (rest) args.rest = RestHeads(step, factor);
  context_.backend->RankAttend(args);
  return ReadBits();
}

std::span<const RestHead> SparseMethod::RestHeads(const Step& step, std::span<const float> factor) {
  const std::size_t group = Size(geometry().group());
  auto& rest = HeadScratch<RestHead>(Size(geometry().n_kv_heads));
  for (std::size_t kv = 0; kv < rest.size(); ++kv) {
    const ValueMeans& values = Values(step.layer, static_cast<std::int32_t>(kv));
    const std::size_t first = kv * group;
    rest[kv] = {offset_.data() + first,    noise_.data() + first,
                factor.data() + first,     values.block_means(),
                values.mean().data(),      rest_.data() + first * Size(geometry().head_dim),
                rest_mass_.data() + first, &means_read_[kv]};
  }
  return rest;
}

void SparseMethod::Select(const Step& step) {
  const HeadGeometry& heads = geometry();
  const std::size_t n_kv = Size(heads.n_kv_heads);
  const bool one_set = group_rule() != GroupRule::kPerHead;
  const std::size_t group = one_set ? 1 : Size(heads.group());
  const std::size_t keep = Size(step.keep);
  const std::vector<float>& scores = one_set ? shared_ : scores_;
  const std::size_t stride = scores_.size() / Size(heads.n_heads);
  ReserveLists(step, group);
  Grow(&winners_, n_kv * group * keep);
  auto& select = HeadScratch<SelectHead>(n_kv);
  for (std::size_t h = 0; h < n_kv; ++h) {
    select[h] = {scores.data() + h * group * stride, static_cast<std::int64_t>(stride),
                 winners_.data() + h * group * keep, tokens_.data() + h * capacity_,
                 mask_.data() + h * capacity_,       &attended_[h]};
  }
  context_.backend->Select(
      {static_cast<std::int32_t>(group), kSinks, step.last, step.n_tokens, step.keep, select});
  if (!one_set) return;
  const auto everyone = static_cast<std::uint16_t>((1U << heads.group()) - 1);
  for (std::size_t h = 0; h < n_kv; ++h) {
    std::fill_n(mask_.data() + h * capacity_, Size(attended_[h]), everyone);
  }
}

// What to attend of every KV head. Brings the mean values of the layer up to date as well.
std::span<AttendHead> SparseMethod::AttendHeads(const Step& step, const float* q, float* out) {
  const HeadGeometry& heads = geometry();
  const std::size_t head_floats = Size(heads.group()) * Size(heads.head_dim);
  lse_.resize(Size(heads.n_heads));
  n_values_.resize(Size(heads.n_kv_heads));
  auto& attend = HeadScratch<AttendHead>(Size(heads.n_kv_heads));
  for (std::size_t h = 0; h < attend.size(); ++h) {
    attend[h] = {context_.rows->rows(step.layer, static_cast<std::int32_t>(h)),
                 q + h * head_floats,
                 tokens_.data() + h * capacity_,
                 mask_.data() + h * capacity_,
                 attended_[h],
                 out + h * head_floats,
                 lse_.data() + h * Size(heads.group()),
                 nullptr,
                 &n_values_[h]};
    if (values_.empty()) continue;
    ValueMeans& values = Values(step.layer, static_cast<std::int32_t>(h));
    values.MoveTo(attend[h].rows, step.n_index, SkippedValues());
    if (values.is_finite()) attend[h].mean_value = values.mean().data();
  }
  return attend;
}

// rest_ and rest_mass_: the values of the tokens that a head did not attend, by their estimated
// mass, in units of what it did attend (its sum of exp). Spoils the scores of attended tokens.
void SparseMethod::MeasureRest(const Step& step, const float* q) {
  const std::size_t n_heads = Size(geometry().n_heads);
  const std::size_t n_blocks = Size(step.n_index / kBlockTokens);
  Grow(&mass_, n_heads * n_blocks);
  MassOfScores(step, q);
  for (std::size_t h = 0; h < n_heads; ++h) {
    const float* blocks = mass_.data() + h * n_blocks;
    rest_mass_[h] =
        static_cast<float>(SumInLanes(n_blocks, [&](std::size_t b) { return double{blocks[b]}; }));
  }
  WeighRest(step, n_blocks);
}

void SparseMethod::MassOfScores(const Step& step, const float* q) {
  const HeadGeometry& heads = geometry();
  const std::size_t n_heads = Size(heads.n_heads);
  const std::size_t group = Size(heads.group());
  const std::size_t stride = scores_.size() / n_heads;
  const std::size_t n_blocks = Size(step.n_index / kBlockTokens);
  shift_.resize(n_heads);
  SelectedLse(step.layer, step.n_tokens, q, ScoreBuffers(), lse_);
  for (std::size_t h = 0; h < n_heads; ++h) {
    shift_[h] = lse_[h] - offset_[h] * scale() - noise_[h] * scale() * scale() / 2;
  }
  auto& mass = HeadScratch<MassHead>(Size(heads.n_kv_heads));
  for (std::size_t kv = 0; kv < mass.size(); ++kv) {
    mass[kv] = {scores_.data() + kv * group * stride,
                static_cast<std::int64_t>(stride),
                shift_.data() + kv * group,
                mass_.data() + kv * group * n_blocks,
                tokens_.data() + kv * capacity_,
                mask_.data() + kv * capacity_,
                attended_[kv]};
  }
  context_.backend->Mass({heads.group(), static_cast<std::int64_t>(n_blocks), scale(), mass});
}

// rest_ out of mass_, rest_mass_ and the mean values.
void SparseMethod::WeighRest(const Step& step, std::size_t n_blocks) {
  const HeadGeometry& heads = geometry();
  const std::size_t group = Size(heads.group());
  least_mass_.resize(Size(heads.n_heads));
  std::ranges::transform(rest_mass_, least_mass_.begin(),
                         [](float rest) { return kLeastBlockShare * (1 + rest); });
  auto& weigh = HeadScratch<WeighHead>(Size(heads.n_kv_heads));
  for (std::size_t kv = 0; kv < weigh.size(); ++kv) {
    const ValueMeans& values = Values(step.layer, static_cast<std::int32_t>(kv));
    weigh[kv] = {values.block_means(),
                 values.mean().data(),
                 mass_.data() + kv * group * n_blocks,
                 least_mass_.data() + kv * group,
                 rest_.data() + kv * group * Size(heads.head_dim),
                 &means_read_[kv]};
  }
  context_.backend->Weigh(
      {heads.head_dim, heads.group(), static_cast<std::int64_t>(n_blocks), weigh});
}

void SparseMethod::BuildIndex(std::int64_t n_tokens) {
  if (n_tokens < config_.min || n_tokens < kBlockTokens) return;
  max_tokens_ = std::max(max_tokens_, n_tokens);
  BuildAll(n_tokens);
  if (values_.empty()) return;
  if (Outgrown(fitted_tokens_, n_tokens)) std::ranges::fill(fitted_, 0);
  for (std::int32_t layer = config_.dense_layers; layer < n_layers(); ++layer) {
    if (fitted_[Size(layer)] != 0) continue;
    if (config_.residual != ResidualRule::kOff) {
      ExtendIndex(layer, n_tokens);
      FitResidual(layer, n_tokens);
    }
    for (std::int32_t h = 0; h < geometry().n_kv_heads; ++h) {
      Values(layer, h).MoveTo(context_.rows->rows(layer, h), n_tokens / kBlockTokens * kBlockTokens,
                              SkippedValues());
    }
  }
}

void SparseMethod::Truncate(std::int64_t n_tokens) {
  TruncateIndex(n_tokens);
  std::ranges::fill(attended_, -1);
  max_tokens_ = std::min(max_tokens_, n_tokens);
  const bool refit = n_tokens < fitted_tokens_;
  for (ValueMeans& values : values_) {
    refit ? values.Clear() : values.Truncate(n_tokens / kBlockTokens * kBlockTokens);
  }
  if (refit) {
    std::ranges::fill(fitted_, 0);
    std::ranges::fill(factor_, 0.0F);
    fitted_tokens_ = 0;
  }
}

std::int64_t SparseMethod::MemoryBytes() const {
  std::int64_t bytes = IndexMemory();
  for (const ValueMeans& values : values_) bytes += values.MemoryBytes();
  return bytes;
}

std::span<const float> SparseMethod::residual_factors() const {
  if (config_.residual == ResidualRule::kOff || fixed_residual()) return {};
  return factor_;
}

AttendedTokens SparseMethod::attended(std::int32_t kv_head) const {
  const std::int64_t n = attended_[Size(kv_head)];
  if (n < 0) return {};
  const std::size_t first = Size(kv_head) * capacity_;
  return {{tokens_.data() + first, Size(n)}, {mask_.data() + first, Size(n)}};
}

}  // namespace fathom
