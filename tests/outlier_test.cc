// SPDX-License-Identifier: MIT
// Keys as biased k-projections make them (Qwen2.5): a few channels carry a constant hundreds of
// times larger than what varies.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fathom/fathom.h"
#include "support/layered_session.h"

namespace fathom {
namespace {

using test::LayeredSession;
using test::Size;

constexpr std::int64_t kN = 4096;
constexpr std::int32_t kDim = 128, kGroup = 4;
constexpr int kQueries = 40;

bool IsBiased(std::int32_t channel) { return channel % 32 == 5; }

// Channels of different spread, the biased ones with a spread of 1. A row is fp16, where numbers
// around 500 are 1/4 apart: rounding adds (1/4)^2 / 12 = 0.5 % to the variance of a biased channel.
// Recall is measured against the exact scores of the rounded rows, so that this costs nothing.
std::unique_ptr<LayeredSession> MakeSession(double bias) {
  auto session = std::make_unique<LayeredSession>(1, HeadGeometry{kGroup, 1, kDim}, kN, 31);
  test::Random random(32);
  for (std::int32_t d = 0; d < kDim; ++d) {
    const double spread = IsBiased(d) ? 1.0 : std::exp2(-3.0 * random.Uniform());
    const double sign = d % 64 == 5 ? 1 : -1;
    for (std::int64_t t = 0; t < kN; ++t) {
      float& key = session->Key(0, t, 0, d);
      key = static_cast<float>(key * spread + (IsBiased(d) ? sign * bias : 0.0));
    }
  }
  session->Write();
  return session;
}

// Mean share of the exact winners that the method chose.
double Recall(const LayeredSession& session, const std::string& spec) {
  const auto exact = session.Make("exact:k=136,min=0");
  const auto method = session.Make(spec + ",k=136,min=0");
  double hits = 0;
  for (int i = 0; i < kQueries; ++i) {
    auto q = session.Query(static_cast<std::uint64_t>(1000 + i));
    // What varies in the biased channels is what these queries look for.
    for (std::int32_t h = 0; h < kGroup; ++h) {
      for (std::int32_t d = 0; d < kDim; ++d) {
        if (IsBiased(d)) q[Size(h * kDim + d)] *= 3;
      }
    }
    std::vector<std::uint16_t> truth(Size(kN));
    session.Attend(*exact, q);
    const AttendedTokens best = exact->attended(0);
    for (std::size_t t = 0; t < best.tokens.size(); ++t) truth[Size(best.tokens[t])] = best.mask[t];
    session.Attend(*method, q);
    const AttendedTokens chosen = method->attended(0);
    for (std::size_t t = 0; t < chosen.tokens.size(); ++t) {
      hits += __builtin_popcount(truth[Size(chosen.tokens[t])] & chosen.mask[t]);
    }
  }
  return (hits / (kQueries * kGroup) - kAlwaysKept) / 100;
}

TEST(Outliers, ABiasOfKeysCostsTheDefaultNothing) {
  const double plain = Recall(*MakeSession(0), "fathom:bits=28");
  const double biased = Recall(*MakeSession(500), "fathom:bits=28");
  RecordProperty("plain", std::to_string(plain));
  RecordProperty("biased", std::to_string(biased));
  EXPECT_GT(plain, 0.4) << "there has to be something to lose";
  EXPECT_NEAR(biased, plain, 0.02);
}

TEST(Outliers, WithoutCentringItDestroysTheScan) {
  const std::string raw = "fathom:preset=paper,basis=raw,budget=48";
  const double plain = Recall(*MakeSession(0), raw);
  const double biased = Recall(*MakeSession(500), raw);
  RecordProperty("plain", std::to_string(plain));
  RecordProperty("biased", std::to_string(biased));
  EXPECT_GT(plain, 0.4);
  EXPECT_LT(biased, plain - 0.1);
  // The same read in centred coordinates does not see the bias.
  EXPECT_NEAR(Recall(*MakeSession(500), "fathom:store=paper,plan=published,bits=57"),
              Recall(*MakeSession(0), "fathom:store=paper,plan=published,bits=57"), 0.02);
}

}  // namespace
}  // namespace fathom
