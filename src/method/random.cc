// SPDX-License-Identifier: MIT
// random: k tokens without looking at any key. The floor: a scan that does not beat it is worth
// nothing.
#include "method/sparse_method.h"

namespace fathom {
namespace {

// SplitMix64 finaliser: a good hash of a counter.
std::uint64_t Mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

class RandomMethod final : public SparseMethod {
 public:
  RandomMethod(const MethodContext& context, SparseConfig config, std::uint64_t seed,
               std::string spec)
      : SparseMethod(context, config, std::move(spec)), seed_(seed) {}

 protected:
  // A function of seed, layer, length, head and token only, so that runs repeat.
  double ScoreLayer(std::int32_t layer, std::int64_t n_tokens, std::int64_t n_index,
                    const float* /*q*/, const LayerScores& layer_scores) override {
    const std::uint64_t step = Mix(seed_ ^ Mix(static_cast<std::uint64_t>(n_tokens) << 16 ^
                                               static_cast<std::uint64_t>(layer)));
    for (std::int32_t h = 0; h < geometry().n_heads; ++h) {
      const std::uint64_t head = Mix(step + static_cast<std::uint64_t>(h));
      float* out = layer_scores.scores + h * layer_scores.stride;
      for (std::int64_t i = 0; i < n_index; ++i) {
        out[i] = static_cast<float>(Mix(head + static_cast<std::uint64_t>(i)) >> 40);
      }
    }
    return 0;
  }

 private:
  const std::uint64_t seed_;
};

struct Config {
  SparseConfig sparse;
  std::uint64_t seed = 0;
};

Config ReadConfig(OptionReader& options) {
  Config config;
  config.sparse = ReadSparseConfig(options);
  config.seed = static_cast<std::uint64_t>(options.Int("seed", 0, 0, INT64_MAX));
  options.Finish();
  return config;
}

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  return std::make_unique<RandomMethod>(context, config.sparse, config.seed, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry /*geometry*/,
                          std::int64_t /*n_tokens*/) {
  Check(options);
  return 0;
}

}  // namespace

const MethodEntry kRandomEntry = {"random", "k tokens chosen blindly: the floor", Check, Make,
                                  IndexBytesOf};

}  // namespace fathom
