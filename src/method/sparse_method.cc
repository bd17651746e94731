// SPDX-License-Identifier: MIT
#include "method/sparse_method.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace fathom {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;  // token indices are 32-bit

// At most one struct per KV head and layer; geometry is checked by RowStore.
template <typename HeadStruct>
std::vector<HeadStruct>& HeadScratch(std::size_t n) {
  thread_local std::vector<HeadStruct> heads;
  heads.assign(n, HeadStruct{});
  return heads;
}

}  // namespace

SparseConfig ReadSparseConfig(OptionReader& options) {
  SparseConfig config;
  config.k = options.Int("k", config.k, kAlwaysKept + 1, kMaxTokens);
  config.min = options.Int("min", config.min, 0, kMaxTokens);
  return config;
}

void AttendDense(const MethodContext& context, std::int32_t layer, std::int64_t n_tokens,
                 const float* q, float* out, MethodCounters* counters) {
  const HeadGeometry& geometry = context.rows->geometry();
  const auto head_floats =
      static_cast<std::size_t>(geometry.group()) * static_cast<std::size_t>(geometry.head_dim);
  thread_local std::vector<float> lse;
  lse.resize(static_cast<std::size_t>(geometry.n_heads));
  auto& heads = HeadScratch<AttendHead>(static_cast<std::size_t>(geometry.n_kv_heads));
  for (std::size_t h = 0; h < heads.size(); ++h) {
    heads[h].rows = context.rows->rows(layer, static_cast<std::int32_t>(h));
    heads[h].q = q + h * head_floats;
    heads[h].n_attended = n_tokens;
    heads[h].out = out + h * head_floats;
    heads[h].lse = lse.data() + h * static_cast<std::size_t>(geometry.group());
  }
  counters->rows += n_tokens * geometry.n_kv_heads;
  counters->row_bytes += n_tokens * geometry.n_kv_heads * 4 * geometry.head_dim;
  context.backend->Attend({geometry.head_dim, geometry.group(),
                           1.0F / std::sqrt(static_cast<float>(geometry.head_dim)), heads});
}

SparseMethod::SparseMethod(const MethodContext& context, SparseConfig config, std::string spec)
    : context_(context), config_(config), spec_(std::move(spec)) {}

void SparseMethod::Attend(std::int32_t layer, std::int64_t n_tokens, const float* q, float* out) {
  const HeadGeometry& heads = geometry();
  if (layer == 0) ++counters_.steps;
  counters_.calls += heads.n_kv_heads;

  const std::int64_t n_index = n_tokens / kBlockTokens * kBlockTokens;
  const std::int64_t last = std::min(n_index, n_tokens - kWindow);
  const bool sparse =
      n_tokens > config_.k && n_tokens >= config_.min && last - kSinks > config_.k - kAlwaysKept;
  if (!sparse) {
    AttendDense(context_, layer, n_tokens, q, out, &counters_);
    return;
  }

  const auto n_heads = static_cast<std::size_t>(heads.n_heads);
  if (scores_.size() < n_heads * static_cast<std::size_t>(n_index)) {
    scores_.resize(n_heads * static_cast<std::size_t>(n_index + n_index / 4));
  }
  const auto stride = static_cast<std::int64_t>(scores_.size() / n_heads);
  const double bits = ScoreLayer(layer, n_tokens, n_index, q, scores_.data(), stride);
  counters_.sparse_calls += heads.n_kv_heads;
  counters_.read_bits += bits;
  counters_.index_bytes += std::llround(bits * static_cast<double>(n_index) / 8);
  AttendWinners(layer, n_tokens, last, q, out);
}

void SparseMethod::AttendWinners(std::int32_t layer, std::int64_t n_tokens, std::int64_t last,
                                 const float* q, float* out) {
  const HeadGeometry& heads = geometry();
  const auto n_kv = static_cast<std::size_t>(heads.n_kv_heads);
  const auto group = static_cast<std::size_t>(heads.group());
  const auto dim = static_cast<std::size_t>(heads.head_dim);
  const auto keep = static_cast<std::size_t>(config_.k - kAlwaysKept);
  const std::size_t stride = scores_.size() / static_cast<std::size_t>(heads.n_heads);
  const auto always = static_cast<std::size_t>(n_tokens - last + kSinks);
  const std::size_t capacity =
      always + std::min(group * keep, static_cast<std::size_t>(last - kSinks));

  // Only grow: warm steps then touch no allocator.
  if (winners_.size() < n_kv * group * keep) winners_.resize(n_kv * group * keep);
  if (tokens_.size() < n_kv * capacity) {
    tokens_.resize(n_kv * (capacity + kBlockTokens));
    mask_.resize(tokens_.size());
  }
  attended_.resize(n_kv);
  lse_.resize(n_kv * group);

  auto& select = HeadScratch<SelectHead>(n_kv);
  for (std::size_t h = 0; h < n_kv; ++h) {
    select[h] = {scores_.data() + h * group * stride, static_cast<std::int64_t>(stride),
                 winners_.data() + h * group * keep,  tokens_.data() + h * capacity,
                 mask_.data() + h * capacity,         &attended_[h]};
  }
  context_.backend->Select(
      {heads.group(), kSinks, last, n_tokens, static_cast<std::int64_t>(keep), select});

  auto& attend = HeadScratch<AttendHead>(n_kv);
  for (std::size_t h = 0; h < n_kv; ++h) {
    attend[h] = {context_.rows->rows(layer, static_cast<std::int32_t>(h)),
                 q + h * group * dim,
                 select[h].tokens,
                 select[h].mask,
                 attended_[h],
                 out + h * group * dim,
                 lse_.data() + h * group};
    counters_.rows += attended_[h];
    counters_.row_bytes += attended_[h] * 4 * heads.head_dim;
  }
  context_.backend->Attend(
      {heads.head_dim, heads.group(), 1.0F / std::sqrt(static_cast<float>(dim)), attend});
}

}  // namespace fathom
