// SPDX-License-Identifier: MIT
// The worked example of docs/design.md section 3, digit for digit: six keys of four channels, two
// query heads.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "base/half.h"
#include "fathom/backend.h"
#include "fathom/plan.h"
#include "store/layout.h"

namespace fathom {
namespace {

constexpr int kDim = 4, kKeys = 6, kHeads = 2;
constexpr int kSegmentBlocks = 2;

constexpr float kKey[kKeys][kDim] = {{1.8f, .4f, -.2f, .05f},  {-1.1f, .9f, .3f, -.02f},
                                     {.3f, -1.2f, .1f, .04f},  {1.2f, .7f, .4f, .01f},
                                     {-.6f, -.3f, -.5f, .03f}, {.9f, 1.1f, -.3f, -.05f}};
constexpr float kQuery[kHeads * kDim] = {3, 1, 2, .1f, 1, 2, -1, .2f};
constexpr double kVar[kDim] = {1.222, .755, .127, .001};

using Depth = std::vector<std::uint8_t>;
using Scores = std::array<std::vector<float>, kHeads>;

class WorkedExample : public testing::Test {
 protected:
  // The keys and 58 zero keys, which do not change the maxima, make one block.
  void SetUp() override {
    std::vector<float> x(kBlockTokens * kDim);
    std::copy_n(&kKey[0][0], kKeys * kDim, x.begin());
    PackArgs args;
    args.codec = Codec::kPaper;
    args.head_dim = kDim;
    args.segment_blocks = kSegmentBlocks;
    args.x = x.data();
    args.planes = planes_.data();
    args.side = reinterpret_cast<std::uint8_t*>(scales_.data());
    backend_->Pack(args);
  }

  int Code(int channel, int token) const {
    const auto word = [&](int p) {
      return planes_[layout::PlaneWord(channel, p, 0, kSegmentBlocks)];
    };
    return layout::Code(word(0), word(1), word(2), word(3), token);
  }

  Scores Scan(const Depth& depth) const {
    const SegmentView segment = {planes_.data(),
                                 reinterpret_cast<const std::uint8_t*>(scales_.data()), 1, 0};
    std::vector<float> scores(kHeads * kBlockTokens);
    ScanHead head;
    head.segments = {&segment, 1};
    head.q = kQuery;
    head.depth = depth.data();
    head.scores = scores.data();
    head.stride = kBlockTokens;
    ScanArgs args;
    args.codec = Codec::kPaper;
    args.head_dim = kDim;
    args.group = kHeads;
    args.segment_blocks = kSegmentBlocks;
    args.heads = {&head, 1};
    backend_->Scan(args);
    return {
        std::vector<float>(scores.begin(), scores.begin() + kKeys),
        std::vector<float>(scores.begin() + kBlockTokens, scores.begin() + kBlockTokens + kKeys)};
  }

  std::unique_ptr<Backend> backend_ = MakeBackend("ref", 1);
  std::vector<std::uint64_t> planes_ = std::vector<std::uint64_t>(kDim * kPlanes * kSegmentBlocks);
  std::vector<Half> scales_ = std::vector<Half>(kDim * kSegmentBlocks);
};

std::set<int> TopTwo(const std::vector<float>& scores) {
  std::vector<int> order(scores.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  return {order[0], order[1]};
}

Scores ExactScores() {
  Scores scores;
  for (int h = 0; h < kHeads; ++h) {
    for (const auto& key : kKey) {
      float sum = 0;
      for (int j = 0; j < kDim; ++j) sum += kQuery[h * kDim + j] * key[j];
      scores[static_cast<std::size_t>(h)].push_back(sum);
    }
  }
  return scores;
}

const std::set<int> kTopA = {0, 3}, kTopB = {0, 5};

// The printed values have two digits behind the point.
void ExpectPrinted(const std::vector<float>& scores, const std::vector<double>& printed) {
  ASSERT_EQ(scores.size(), printed.size());
  for (std::size_t i = 0; i < printed.size(); ++i) {
    EXPECT_NEAR(scores[i], printed[i], 0.0051) << "key " << i;
  }
}

TEST_F(WorkedExample, PlanOfEightBits) {
  const PaperPlan plan = PlanPaper(kQuery, kHeads, kVar, 8);
  EXPECT_NEAR(std::exp2(plan.theta), .0794, 5e-5);  // printed as a value of g, not its logarithm
  EXPECT_EQ(plan.depth, (Depth{4, 3, 1, 0}));
}

TEST_F(WorkedExample, PlanOfSixBits) {
  const PaperPlan plan = PlanPaper(kQuery, kHeads, kVar, 6);
  EXPECT_NEAR(std::exp2(plan.theta), .118, 5e-4);
  EXPECT_EQ(plan.depth, (Depth{3, 2, 1, 0}));
}

TEST_F(WorkedExample, CodesOfChannelTwo) {
  constexpr std::array<int, kKeys> kCodes = {4, 12, 9, 14, 0, 3};
  for (int i = 0; i < kKeys; ++i) EXPECT_EQ(Code(2, i), kCodes[static_cast<std::size_t>(i)]) << i;
  EXPECT_EQ(HalfToFloat(scales_[2 * kSegmentBlocks]), .5f);
  EXPECT_EQ(Code(2, kKeys), 8) << "a zero key is the cell just above zero";
}

TEST_F(WorkedExample, TheKeyOnACellEdgeFollowsSinglePrecision) { EXPECT_EQ(Code(1, 1), 13); }

TEST_F(WorkedExample, ScoresAtEightBits) {
  const Scores scores = Scan({4, 3, 1, 0});
  ExpectPrinted(scores[0], {5.01, -1.79, .46, 4.96, -2.34, 3.59});
  ExpectPrinted(scores[1], {2.84, .24, -2.01, 2.49, -.61, 3.36});
  EXPECT_EQ(TopTwo(scores[0]), kTopA);
  EXPECT_EQ(TopTwo(scores[1]), kTopB);
}

TEST_F(WorkedExample, ExactScoresRankTheSame) {
  const Scores scores = ExactScores();
  EXPECT_EQ(TopTwo(scores[0]), kTopA);
  EXPECT_EQ(TopTwo(scores[1]), kTopB);
}

TEST_F(WorkedExample, SixBitsMisrankHeadB) {
  const Scores scores = Scan({3, 2, 1, 0});
  EXPECT_EQ(TopTwo(scores[0]), kTopA);
  EXPECT_NE(TopTwo(scores[1]), kTopB);
}

TEST_F(WorkedExample, TwoPlanesOfEveryChannelMisrankBothHeads) {
  const Scores scores = Scan({2, 2, 2, 2});
  EXPECT_NE(TopTwo(scores[0]), kTopA);
  EXPECT_NE(TopTwo(scores[1]), kTopB);
}

TEST_F(WorkedExample, AllPlanesRankBothHeadsRight) {
  const Scores scores = Scan({4, 4, 4, 4});
  EXPECT_EQ(TopTwo(scores[0]), kTopA);
  EXPECT_EQ(TopTwo(scores[1]), kTopB);
}

}  // namespace
}  // namespace fathom
