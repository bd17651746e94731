// SPDX-License-Identifier: MIT
// h2o (Zhang et al., arXiv 2306.14048): keeps the tokens that received most attention so far and
// drops the others for good. No scan: 0 read bits; 4 bytes per kept token.
//
// A token's score is the sum of the softmax probabilities it received from all queries since it
// came. One set per KV head, scores summed over the group's heads: the author's code knows no
// groups, this is the rule that fits them. After the prompt and at every step the lowest scores
// among the tokens older than the newest `recent` go until k are left; the recent part contains the
// protocol's window, and like every method this one attends sinks and tail as well.
//
// - Prefill keeps no probabilities, so those of the prompt are recomputed for the queries that the
//   session sampled from it, each over its own past, and scaled to the number of the prompt's
//   tokens. Without samples all of the prompt counts 0, and the smaller tokens stay.
// - Tokens that come by another way than decode, a second prompt say, start with 0.
// - A position counts once, however often it is attended.
// - Truncation: below the tokens of the build the state goes and is made anew. Above it, it returns
//   to the state of the build, of which a copy is kept (not counted: the author's system has none).
//   What later steps added is lost with it, also of the steps that remain, whose queries nobody has
//   kept; so nothing of the forgotten tokens is left. Truncation that forgets nothing changes
//   nothing.
// - Positions are the true ones; the author numbers tokens by their place in the cache.
// `basis` is accepted, so that it can be given to all methods alike, and changes nothing.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "base/half.h"
#include "base/parallel.h"
#include "fathom/error.h"
#include "method/plane_method.h"

namespace fathom {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t LastCandidate(std::int64_t n_tokens) {
  return std::min(n_tokens / kBlockTokens * kBlockTokens, n_tokens - kWindow);
}

struct Config {
  SparseConfig sparse;
  std::int64_t recent = kWindow;
};

// What one KV head still has, sinks left out.
struct KeptTokens {
  std::vector<std::int32_t> token;  // ascending: survivors, then all that are no candidates yet
  std::vector<float> score;
};

// Replaces scores by exp(scale * (score - largest)) and returns the sum. What is no number gets 0.
double ExpSum(float* scores, std::int64_t n, float scale) {
  float top = -kInfinity;
  for (std::int64_t i = 0; i < n; ++i) {
    if (std::isfinite(scores[i])) top = std::max(top, scores[i]);
  }
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    scores[i] = std::isfinite(scores[i]) ? std::exp((scores[i] - top) * scale) : 0.0F;
    sum += scores[i];
  }
  return sum;
}

class H2oMethod final : public SparseMethod {
 public:
  H2oMethod(const MethodContext& context, const Config& config, std::string spec)
      : SparseMethod(context, config.sparse, std::move(spec)),
        recent_(config.recent),
        layers_(Size(n_layers())),
        work_(Size(geometry().n_kv_heads)) {}

 protected:
  double ScoreLayer(std::int32_t layer, std::int64_t n_tokens, std::int64_t n_index,
                    const float* /*q*/, const LayerScores& out) override;
  // The state is already summed over the group: its first head carries it.
  GroupRule group_rule() const override { return GroupRule::kSumScores; }
  void Observe(std::int32_t layer, std::int64_t n_tokens, const float* q) override;

  void BuildAll(std::int64_t n_tokens) override {
    for (std::int32_t layer = 0; layer < n_layers(); ++layer) {
      if (layers_[Size(layer)].built == 0) Build(layer, n_tokens);
    }
  }
  void ExtendIndex(std::int32_t layer, std::int64_t n_tokens) override;
  void TruncateIndex(std::int64_t n_tokens) override;
  std::int64_t IndexMemory() const override;

 private:
  struct Layer {
    std::int64_t built = 0;            // tokens at build time; 0: no state
    std::int64_t seen = 0;             // tokens that `heads` knows
    std::int64_t observed = 0;         // tokens at the last step that was counted
    std::vector<KeptTokens> heads;     // [n_kv_heads]
    std::vector<KeptTokens> at_build;  // [n_kv_heads]
  };
  struct Work {                      // of one KV head, kept for its memory
    std::vector<float> key;          // [D]
    std::vector<float> logits;       // [group][attended]
    std::vector<float> probability;  // [attended], summed over the group
    KeptTokens next;
  };

  void Build(std::int32_t layer, std::int64_t n_tokens);
  std::vector<double> PromptScores(std::int32_t layer, std::int32_t kv_head,
                                   std::int64_t n_tokens) const;
  KeptTokens Survivors(const std::vector<double>& scores) const;
  void Probabilities(std::int32_t layer, std::int32_t kv_head, const float* q, Work* work) const;
  static void AddAndEvict(const AttendedTokens& step, Work* work, KeptTokens* kept);

  const std::int64_t recent_;
  std::vector<Layer> layers_;
  std::vector<Work> work_;  // [n_kv_heads]
};

// Sums over the sampled queries below n_tokens and the heads of the group, [n_tokens].
std::vector<double> H2oMethod::PromptScores(std::int32_t layer, std::int32_t kv_head,
                                            std::int64_t n_tokens) const {
  std::vector<double> sum(Size(n_tokens));
  if (context_.queries == nullptr) return sum;
  const QuerySamples& samples = (*context_.queries)[Size(layer)].samples;
  const auto positions = samples.positions();
  const auto count =
      std::lower_bound(positions.begin(), positions.end(), n_tokens) - positions.begin();
  const std::int32_t group = geometry().group();
  const std::int32_t batch = std::max(1, kMaxGroup / group);  // samples that share a pass
  const std::size_t query = Size(group) * Size(geometry().head_dim);
  std::vector<float> q(Size(batch) * query);
  std::vector<float> scores(Size(batch * group) * Size(n_tokens));
  std::vector<double> weight(Size(batch * group));
  for (std::int64_t first = 0; first < count; first += batch) {
    const auto n = static_cast<std::int32_t>(std::min<std::int64_t>(batch, count - first));
    for (std::int32_t s = 0; s < n; ++s) {
      std::copy_n(samples.query(first + s) + Size(kv_head) * query, query,
                  q.begin() + static_cast<std::ptrdiff_t>(Size(s) * query));
    }
    const auto seen = [&](std::int64_t row) { return positions[Size(first + row / group)] + 1; };
    const std::int64_t longest = seen((n - 1) * group);
    const ScoreHead head = {context_.rows->rows(layer, kv_head), q.data(), scores.data(), n_tokens};
    context_.backend->Score({geometry().head_dim, n * group, longest, {&head, 1}});
    const int n_threads = context_.backend->n_threads();
    ParallelFor(n * group, n_threads, [&](std::int64_t row) {
      const double total = ExpSum(scores.data() + row * n_tokens, seen(row), scale());
      weight[Size(row)] = total > 0 ? 1 / total : 0;
    });
    constexpr std::int64_t kRange = 4096;  // tokens per task
    ParallelFor((longest + kRange - 1) / kRange, n_threads, [&](std::int64_t range) {
      for (std::int64_t row = 0; row < n * group; ++row) {
        const std::int64_t end = std::min((range + 1) * kRange, seen(row));
        for (std::int64_t i = range * kRange; i < end; ++i) {
          sum[Size(i)] += scores[Size(row * n_tokens + i)] * weight[Size(row)];
        }
      }
    });
  }
  const double scale = count > 0 ? static_cast<double>(n_tokens) / static_cast<double>(count) : 0;
  for (double& s : sum) s *= scale;
  return sum;
}

// The state after a prompt whose tokens have these scores.
KeptTokens H2oMethod::Survivors(const std::vector<double>& scores) const {
  const auto n_tokens = static_cast<std::int64_t>(scores.size());
  const std::int64_t last = LastCandidate(n_tokens);
  const std::int64_t n_candidates = std::max<std::int64_t>(last - kSinks, 0);
  const std::int64_t keep = std::min(config_.k - kAlwaysKept, n_candidates);
  KeptTokens kept;
  kept.token.resize(Size(n_candidates));
  std::iota(kept.token.begin(), kept.token.end(), kSinks);
  const auto rank = [&](std::int32_t token) {
    return token >= n_tokens - recent_ ? static_cast<double>(kInfinity) : scores[Size(token)];
  };
  std::nth_element(kept.token.begin(), kept.token.begin() + keep, kept.token.end(),
                   [&](std::int32_t a, std::int32_t b) {
                     const double x = rank(a), y = rank(b);
                     return x > y || (x == y && a < b);
                   });
  kept.token.resize(Size(keep));
  std::ranges::sort(kept.token);
  for (std::int64_t i = std::max<std::int64_t>(last, kSinks); i < n_tokens; ++i) {
    kept.token.push_back(static_cast<std::int32_t>(i));
  }
  for (const std::int32_t token : kept.token) {
    kept.score.push_back(static_cast<float>(scores[Size(token)]));
  }
  return kept;
}

// Layer by layer and head by head: the backend's threads share the work inside.
void H2oMethod::Build(std::int32_t layer, std::int64_t n_tokens) {
  Layer made;
  for (std::int32_t h = 0; h < geometry().n_kv_heads; ++h) {
    made.heads.push_back(Survivors(PromptScores(layer, h, n_tokens)));
  }
  made.at_build = made.heads;
  made.built = made.seen = n_tokens;
  layers_[Size(layer)] = std::move(made);
}

void H2oMethod::ExtendIndex(std::int32_t layer, std::int64_t n_tokens) {
  Layer& state = layers_[Size(layer)];
  if (state.built == 0) {
    Build(layer, n_tokens);
    return;
  }
  for (; state.seen < n_tokens; ++state.seen) {
    for (KeptTokens& kept : state.heads) {
      kept.token.push_back(static_cast<std::int32_t>(state.seen));
      kept.score.push_back(0.0F);
    }
  }
}

void H2oMethod::TruncateIndex(std::int64_t n_tokens) {
  for (Layer& state : layers_) {
    if (n_tokens < state.built) {
      state = Layer();
    } else if (n_tokens < state.seen) {
      state.heads = state.at_build;
      state.seen = state.built;
      state.observed = 0;
    }
  }
}

std::int64_t H2oMethod::IndexMemory() const {
  std::size_t n = 0;
  for (const Layer& state : layers_) {
    for (const KeptTokens& kept : state.heads) n += kept.score.size();
  }
  return static_cast<std::int64_t>(n * sizeof(float));
}

double H2oMethod::ScoreLayer(std::int32_t layer, std::int64_t n_tokens, std::int64_t n_index,
                             const float* /*q*/, const LayerScores& out) {
  const std::int32_t group = geometry().group();
  ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(), [&](std::int64_t kv) {
    float* scores = out.scores + kv * group * out.stride;
    std::fill_n(scores, n_index, -kInfinity);
    for (std::int32_t h = 1; h < group; ++h) std::fill_n(scores + h * out.stride, n_index, 0.0F);
    const KeptTokens& kept = layers_[Size(layer)].heads[Size(kv)];
    for (std::size_t i = 0; i < kept.token.size() && kept.token[i] < n_index; ++i) {
      const std::int32_t token = kept.token[i];
      scores[token] = token >= n_tokens - recent_ ? kInfinity : kept.score[i];
    }
  });
  return 0;
}

// The probabilities of one step over what it attended, summed over the group. The queries' products
// with k keys only: what attention itself computes.
void H2oMethod::Probabilities(std::int32_t layer, std::int32_t kv_head, const float* q,
                              Work* work) const {
  const AttendedTokens step = attended(kv_head);
  const std::size_t n = step.tokens.size();
  const std::size_t dim = Size(geometry().head_dim);
  const std::size_t group = Size(geometry().group());
  const Half* rows = context_.rows->rows(layer, kv_head);
  const float* head_q = q + Size(kv_head) * group * dim;
  work->key.resize(dim);
  work->logits.resize(group * n);
  work->probability.assign(n, 0.0F);
  for (std::size_t i = 0; i < n; ++i) {
    ConvertHalfToFloat(rows + Size(step.tokens[i]) * 2 * dim, geometry().head_dim,
                       work->key.data());
    for (std::size_t h = 0; h < group; ++h) {
      float dot = 0;
      for (std::size_t d = 0; d < dim; ++d) dot += head_q[h * dim + d] * work->key[d];
      work->logits[h * n + i] = dot;
    }
  }
  for (std::size_t h = 0; h < group; ++h) {
    float* logits = work->logits.data() + h * n;
    const double total = ExpSum(logits, static_cast<std::int64_t>(n), scale());
    const auto weight = static_cast<float>(total > 0 ? 1 / total : 0);
    for (std::size_t i = 0; i < n; ++i) work->probability[i] += logits[i] * weight;
  }
}

// What was not attended is gone.
void H2oMethod::AddAndEvict(const AttendedTokens& step, Work* work, KeptTokens* kept) {
  KeptTokens& next = work->next;
  next.token.clear();
  next.score.clear();
  std::size_t from = 0;
  for (std::size_t i = 0; i < step.tokens.size(); ++i) {
    const std::int32_t token = step.tokens[i];
    if (token < kSinks) continue;
    while (from < kept->token.size() && kept->token[from] < token) ++from;
    const bool known = from < kept->token.size() && kept->token[from] == token;
    next.token.push_back(token);
    next.score.push_back((known ? kept->score[from] : 0.0F) + work->probability[i]);
  }
  std::swap(next, *kept);
}

void H2oMethod::Observe(std::int32_t layer, std::int64_t n_tokens, const float* q) {
  Layer& state = layers_[Size(layer)];
  if (n_tokens <= state.observed) return;
  ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(), [&](std::int64_t kv) {
    const auto kv_head = static_cast<std::int32_t>(kv);
    Work& work = work_[Size(kv)];
    Probabilities(layer, kv_head, q, &work);
    AddAndEvict(attended(kv_head), &work, &state.heads[Size(kv)]);
  });
  state.observed = n_tokens;
}

Config ReadConfig(OptionReader& options) {
  Config config;
  ReadBasis(options, "raw", false);
  config.recent = options.Int("recent", config.recent, kWindow, INT32_MAX);
  config.sparse = ReadSparseConfig(options);
  options.Finish();
  if (config.recent > config.sparse.k - kSinks) {
    throw Error(ErrorCode::kUsage, "h2o: recent=" + std::to_string(config.recent) +
                                       " does not fit into k=" + std::to_string(config.sparse.k) +
                                       " beside 4 sinks; give at most k - 4, or a larger k");
  }
  return config;
}

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  return std::make_unique<H2oMethod>(context, config, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry /*geometry*/, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  if (n_tokens < config.sparse.min || n_tokens < kBlockTokens) return 0;
  const std::int64_t last = LastCandidate(n_tokens);
  const std::int64_t kept = std::min(config.sparse.k - kAlwaysKept, last - kSinks);
  return (kept + n_tokens - last) * std::int64_t{sizeof(float)};
}

}  // namespace

const MethodEntry kH2oEntry = {"h2o", "tokens with most attention so far; the others are dropped",
                               Check, Make, IndexBytesOf};

}  // namespace fathom
