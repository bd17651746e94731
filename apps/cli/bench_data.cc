// SPDX-License-Identifier: MIT
#include "bench_data.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fathom::cli {
namespace {

constexpr std::size_t kTable = std::size_t{1} << 16;
constexpr double kScoreSpread = 2.5;
constexpr float kDrift = 0.8F;   // of the block means, in units of a channel's scale
constexpr float kNoise = 0.6F;   // of a token around them, times a heavy-tailed value
constexpr float kShared = 0.8F;  // of a group's queries; the rest is each head's own
constexpr double kKeyVariance = kDrift * kDrift / 2 + kNoise * kNoise * 3;  // in squared scales

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Hash of a counter (splitmix64): any value of a stream without those before it, so that threads
// need no order.
std::uint64_t Mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

double Uniform(std::uint64_t x) { return static_cast<double>(Mix(x) >> 11) * 0x1p-53; }

double Normal(std::uint64_t x) {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - Uniform(2 * x)));
  return radius * std::cos(2.0 * std::numbers::pi * Uniform(2 * x + 1));
}

// A value of the table for every number.
float Draw(const std::vector<float>& table, std::uint64_t x) { return table[Mix(x) % kTable]; }

}  // namespace

SyntheticHeads::SyntheticHeads(HeadGeometry heads, std::uint64_t seed)
    : heads_(heads), seed_(seed), normal_(kTable), heavy_(kTable) {
  for (std::size_t i = 0; i < kTable; ++i) {
    normal_[i] = static_cast<float>(Normal(seed + i));
    double chi = 0;  // Student's t with three degrees of freedom
    for (std::uint64_t f = 1; f <= 3; ++f) chi += std::pow(Normal(seed + f * kTable + i), 2);
    heavy_[i] = static_cast<float>(normal_[i] / std::sqrt(chi / 3 + 1e-3));
  }
  const std::size_t n = Size(heads.n_kv_heads) * Size(heads.head_dim);
  for (std::size_t c = 0; c < n; ++c) {
    const std::uint64_t x = Mix(seed) + 8 * c;
    scale_.push_back(static_cast<float>(std::exp2(3.5 * Uniform(x) - 2)));
    offset_.push_back(static_cast<float>(2 * Normal(x + 1)));
    period_.push_back(static_cast<float>(std::exp2(8 + 8 * Uniform(x + 4))));  // tokens
    phase_.push_back(static_cast<float>(Uniform(x + 5)));
  }
}

// k, v: [n][n_kv_heads][D].
void SyntheticHeads::FillTokens(std::int64_t first, std::int64_t n, float* k, float* v) const {
  const std::size_t width = scale_.size();
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t block_start = (first + i) / kBlockTokens * kBlockTokens;
    const auto block = static_cast<float>(block_start);
    const std::uint64_t row = Mix(seed_ + Size(first + i)) & ~std::uint64_t{0xFFFF};
    for (std::size_t c = 0; c < width; ++c) {
      const std::size_t at = Size(i) * width + c;
      const float turn = block / period_[c] + phase_[c];
      // A wave of parabolas, which costs less than a sine.
      const float x = 4 * (turn - std::floor(turn)) - 2;
      const float wave = x * (2 - std::fabs(x));
      k[at] = offset_[c] + scale_[c] * (kDrift * wave + kNoise * Draw(heavy_, row + 2 * c));
      v[at] = Draw(normal_, row + 2 * c + 1);
    }
  }
}

std::unique_ptr<RowStore> SyntheticHeads::MakeRows(std::int64_t n_layers,
                                                   std::int64_t n_tokens) const {
  auto rows = std::make_unique<RowStore>(static_cast<std::int32_t>(n_layers), heads_, n_tokens);
  constexpr std::int64_t kChunk = 1024;
  std::vector<float> k(Size(kChunk) * scale_.size());
  std::vector<float> v(k.size());
  for (std::int64_t first = 0; first < n_tokens; first += kChunk) {
    const std::int64_t n = std::min(kChunk, n_tokens - first);
    FillTokens(first, n, k.data(), v.data());
    for (std::int32_t layer = 0; layer < n_layers; ++layer) {
      rows->Write(layer, first, n, k.data(), v.data());
    }
  }
  rows->Commit(n_tokens);
  return rows;
}

std::vector<double> SyntheticHeads::KeyMean(std::int32_t kv_head) const {
  const auto first = offset_.begin() + static_cast<std::ptrdiff_t>(kv_head) * heads_.head_dim;
  return {first, first + heads_.head_dim};
}

std::vector<double> SyntheticHeads::KeyVariance() const {
  std::vector<double> variance;
  variance.reserve(scale_.size());
  for (const float scale : scale_) variance.push_back(std::pow(scale, 2) * kKeyVariance);
  return variance;
}

std::vector<float> SyntheticHeads::Query(std::int64_t number) const {
  const std::size_t dim = Size(heads_.head_dim);
  const std::size_t group = Size(heads_.group());
  std::vector<float> q(Size(heads_.n_heads) * dim);
  const float own = std::sqrt(1 - kShared * kShared);
  const std::uint64_t stream = Mix(seed_ + 1) + (Size(number) << 24);
  for (std::size_t h = 0; h < Size(heads_.n_heads); ++h) {
    float* head = q.data() + h * dim;
    const std::size_t kv = h / group;
    double variance = 0;  // of the head's scores
    for (std::size_t j = 0; j < dim; ++j) {
      const float scale = scale_[kv * dim + j];
      head[j] = (kShared * Draw(normal_, stream + kv * dim + j) +
                 own * Draw(normal_, stream + (h + 1) * 0x10000 + j)) /
                std::sqrt(scale);
      variance += std::pow(head[j] * scale, 2) * kKeyVariance;
    }
    const double norm = kScoreSpread * std::sqrt(static_cast<double>(dim) / variance);
    for (std::size_t j = 0; j < dim; ++j) head[j] *= static_cast<float>(norm);
  }
  return q;
}

std::vector<float> SyntheticHeads::Queries(std::int64_t first, std::int64_t n) const {
  std::vector<float> all;
  all.reserve(Size(n) * Size(heads_.n_heads) * Size(heads_.head_dim));
  for (std::int64_t i = 0; i < n; ++i) {
    const std::vector<float> q = Query(first + i);
    all.insert(all.end(), q.begin(), q.end());
  }
  return all;
}

std::vector<LayerQueries> SyntheticHeads::Samples(std::int64_t n_layers,
                                                  std::int64_t n_tokens) const {
  constexpr std::int64_t kSamples = 64;
  constexpr std::int64_t kRecent = 4;  // fewer than a session's, since each costs a dense attention
  constexpr std::int64_t kFirstNumber = std::int64_t{1} << 20;  // none that is timed
  LayerQueries queries{{heads_.n_heads, heads_.head_dim}, {heads_.n_heads, heads_.head_dim}};
  const std::int64_t step = std::max<std::int64_t>(n_tokens / kSamples, 1);
  for (std::int64_t i = 0; i < kSamples && i * step < n_tokens; ++i) {
    queries.samples.Add(i * step, Query(kFirstNumber + i).data());
  }
  for (std::int64_t i = 0; i < kRecent && kRecent - i < n_tokens; ++i) {
    queries.recent.Add(n_tokens - kRecent + i - 1, Query(kFirstNumber + kSamples + i).data());
  }
  return std::vector<LayerQueries>(Size(n_layers), queries);
}

std::vector<TokenList> ExactLists(const RowStore& rows, std::int64_t n_tokens, std::int64_t k,
                                  const float* q, const Backend& backend) {
  const HeadGeometry& heads = rows.geometry();
  const std::size_t group = Size(heads.group());
  const std::size_t dim = Size(heads.head_dim);
  const std::int64_t last = n_tokens - kWindow;
  const std::int64_t keep = std::min(k - kAlwaysKept, last - kSinks);
  const std::size_t capacity =
      Size(kAlwaysKept + std::min(static_cast<std::int64_t>(group) * keep, last - kSinks));
  std::vector<float> scores(group * Size(n_tokens));
  std::vector<std::int32_t> winners(group * Size(keep));
  std::vector<TokenList> lists(Size(heads.n_kv_heads));
  for (std::size_t kv = 0; kv < lists.size(); ++kv) {
    TokenList& list = lists[kv];
    list.tokens.resize(capacity);
    list.mask.resize(capacity);
    const ScoreHead score = {rows.rows(0, static_cast<std::int32_t>(kv)), q + kv * group * dim,
                             scores.data(), n_tokens};
    backend.Score({heads.head_dim, heads.group(), n_tokens, {&score, 1}});
    std::int64_t n = 0;
    const SelectHead select = {scores.data(),      n_tokens,         winners.data(),
                               list.tokens.data(), list.mask.data(), &n};
    backend.Select({heads.group(), kSinks, last, n_tokens, keep, {&select, 1}});
    list.tokens.resize(Size(n));
    list.mask.resize(Size(n));
  }
  return lists;
}

}  // namespace fathom::cli
