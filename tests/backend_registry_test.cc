// SPDX-License-Identifier: MIT
// The list of backends, what their names promise, and the code above all backends: scan tables and
// the merge of attention states.
#include <gtest/gtest.h>

#include <algorithm>

#include "backend/cpu/cpu_backend.h"
#include "backend/registry.h"
#include "base/cpu_features.h"
#include "fathom/error.h"
#include "support/backend_cases.h"
#include "support/compare.h"

namespace fathom::test {
namespace {

TEST(BackendRegistry, RefIsAlwaysThereAndEveryEntryHasItsReason) {
  const auto list = ListBackends();
  ASSERT_GE(list.size(), 2u);
  const auto ref = std::ranges::find(list, "ref", &BackendInfo::name);
  ASSERT_NE(ref, list.end());
  EXPECT_TRUE(ref->available);
  for (const BackendInfo& info : list) {
    EXPECT_EQ(info.available, info.reason.empty()) << info.name;
    EXPECT_FALSE(info.description.empty()) << info.name;
  }
}

TEST(BackendRegistry, TheForcedInstructionSetIsTheOneThatRuns) {
  for (const BackendInfo& info : ListBackends()) {
    if (!info.available) continue;
    const auto backend = MakeBackend(info.name, 3);
    EXPECT_EQ(backend->name(), info.name);
    if (info.name.rfind("cpu/", 0) != 0) continue;
    EXPECT_EQ(backend->n_threads(), 3);
    const auto* cpu = dynamic_cast<const CpuBackend*>(backend.get());
    ASSERT_NE(cpu, nullptr);
    EXPECT_EQ(std::string("cpu/") + cpu->kernels().isa, info.name);
  }
  EXPECT_STREQ(cpu::PortableKernels()->isa, "portable");
}

TEST(BackendRegistry, CpuTakesTheBestAndAllProcessors) {
  std::string best;
  for (const BackendInfo& info : ListBackends()) {
    if (info.available && info.name.rfind("cpu/", 0) == 0) best = info.name;
  }
  EXPECT_EQ(MakeBackend("cpu", 1)->name(), best);
  EXPECT_EQ(MakeBackend("", 0)->name(), best);
  EXPECT_EQ(MakeBackend("cpu", 0)->n_threads(), UsableProcessors());
}

TEST(BackendRegistry, UnknownNamesAreRefusedWithTheValidOnes) {
  for (const char* name : {"gpu", "cpu/", "cpu/avx", "REF", "cpu/avx2 "}) {
    try {
      MakeBackend(name, 1);
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kUsage);
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos);
      EXPECT_NE(std::string(e.what()).find("cpu/portable"), std::string::npos);
    }
  }
}

TEST(BackendRegistry, UnavailableNamesAreRefusedWithTheReason) {
  int refused = 0;
  for (const BackendInfo& info : ListBackends()) {
    if (info.available) continue;
    ++refused;
    try {
      MakeBackend(info.name, 1);
      ADD_FAILURE() << info.name;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
      EXPECT_NE(std::string(e.what()).find(info.reason), std::string::npos);
    }
  }
  if (refused == 0) GTEST_SKIP() << "this machine can run every backend of the build";
}

TEST(ScanTableTest, IntegerScoresFollowTheDecoder) {
  const auto ref = MakeBackend("ref", 1);
  for (const DataKind kind : {DataKind::kNormal, DataKind::kHeavyTailed, DataKind::kSmooth}) {
    const IndexCase c{.head_dim = 64, .segment_blocks = 8, .blocks = {8}, .kind = kind};
    const TestIndex index = MakeIndex(c, *ref, 1);
    const auto q = RandomNormal(c.head_dim, 2);
    const auto level = RandomLevels(c.head_dim, 0.5, 5, 3);
    std::vector<ScanTable> table(1);
    BuildScanTable(
        {c.head_dim, 1, 4, q.data(), level.data(), index.mean_step.data(), index.weight.data()},
        table.data());
    std::vector<float> scores(static_cast<std::size_t>(index.n_tokens));
    std::vector<ScanHead> heads(1);
    heads[0] = {index.views, table, nullptr, nullptr, scores.data(), index.n_tokens};
    ref->Scan({Codec::kMean, c.head_dim, 1, c.segment_blocks, 4, heads});
    double error = 0, sum = 0, square = 0;
    for (int i = 0; i < index.n_tokens; ++i) {
      double exact = 0;
      for (int j = 0; j < c.head_dim; ++j) {
        const auto at = static_cast<std::size_t>(j);
        if (level[at] == 0) continue;
        const int block = i / kBlockTokens;
        double x = layout::UnpackNibble(index.side[0][at * 4 + static_cast<std::size_t>(block / 2)],
                                        block) *
                   static_cast<double>(index.mean_step[at]);
        for (int p = 0; p + 1 < level[at]; ++p) {
          const auto word = index.planes[0][layout::PlaneWord(j, p, block, c.segment_blocks)];
          const double sign = (word >> (i % kBlockTokens) & 1) != 0 ? 1 : -1;
          x += sign * index.weight[at * 16 + (level[at] - 2u) * 4 + static_cast<std::size_t>(p)];
        }
        exact += q[at] * x;
      }
      error += std::pow(exact - scores[static_cast<std::size_t>(i)], 2);
      sum += exact;
      square += exact * exact;
    }
    const double n = static_cast<double>(index.n_tokens);
    EXPECT_LT(std::sqrt(error / n), 0.08 * std::sqrt(square / n - std::pow(sum / n, 2)));
  }
}

TEST(ScanTableTest, WeightsFollowTheRule) {
  const std::vector<float> q = {1, -2};
  const std::vector<std::uint8_t> level = {3, 1};
  const std::vector<float> step = {0.5f, 0.25f};
  std::vector<float> weight(2 * 16, 100.0f);
  weight[4] = 0.5f;  // channel 0, two planes
  weight[5] = -0.25f;
  ScanTable t;
  BuildScanTable({2, 1, 4, q.data(), level.data(), step.data(), weight.data()}, &t);
  // S = 255 / 0.75, u = 2 / S, M = 7 (0.5 + 0.5) = 1190 u: 2^13 (129 + 1190) < 2^24 - 2^15 < 2^14
  // ..
  const double u = 2 * 0.75 / 255;
  EXPECT_EQ(t.n_parts, 1);
  EXPECT_EQ(t.plane, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(t.part_end, (std::vector<std::int32_t>{2}));
  EXPECT_EQ(t.weight, (std::vector<std::int16_t>{170, -85}));
  EXPECT_EQ(t.low, (std::vector<std::int32_t>{85}));
  EXPECT_EQ(t.channel, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(t.shift, (std::vector<std::int32_t>{13}));
  EXPECT_EQ(t.scale[0], static_cast<float>(u / 8192));
  EXPECT_EQ(t.mean_weight, (std::vector<std::int32_t>{696320, -696320}));  // 0.5 / scale
  EXPECT_EQ(t.constant, (std::vector<std::int32_t>{-1044480}));            // 8192 * 127.5
}

// Planes of a channel go to different parts, and no part's weights exceed a byte.
TEST(ScanTableTest, ManyPlanesShareTheirBytes) {
  for (const auto& [dim, parts] : {std::pair{3, 1}, {4, 2}, {12, 2}, {13, 4}, {32, 4}, {33, 8}}) {
    const auto q = RandomNormal(3 * dim, 5);
    const std::vector<std::uint8_t> level(static_cast<std::size_t>(dim), 5);
    const std::vector<float> step(static_cast<std::size_t>(dim), 0.1f);
    const auto weight = RandomNormal(dim * 16, 6);
    ScanTable t;
    BuildScanTable({dim, 3, 4, q.data(), level.data(), step.data(), weight.data()}, &t);
    ASSERT_EQ(t.n_parts, parts) << dim;
    std::vector<std::int32_t> planes = t.plane;
    std::ranges::sort(planes);
    for (std::int32_t i = 0; i < 4 * dim; ++i) EXPECT_EQ(planes[static_cast<std::size_t>(i)], i);
    for (std::size_t h = 0; h < 3; ++h) {
      std::size_t p = 0;
      int most = 0;
      for (std::size_t r = 0; r < t.part_end.size(); ++r) {
        int sum = 0, low = 0;
        for (; p < static_cast<std::size_t>(t.part_end[r]); ++p) {
          sum += std::abs(t.weight[p * 3 + h]);
          low -= std::min<int>(t.weight[p * 3 + h], 0);
        }
        EXPECT_LE(sum, 255);
        EXPECT_EQ(low, t.low[r * 3 + h]);
        most = std::max(most, sum);
      }
      EXPECT_GE(most, 245);
    }
  }
}

TEST(ScanTableTest, NothingReadAndZeroQueries) {
  const std::vector<float> zero(32, 0.0f);
  const std::vector<float> weight(32 * 16, 1.0f);
  ScanTable t;
  const std::vector<std::uint8_t> none(32, 0);
  BuildScanTable({32, 1, 4, zero.data(), none.data(), zero.data(), weight.data()}, &t);
  EXPECT_TRUE(t.plane.empty());
  EXPECT_TRUE(t.channel.empty());
  EXPECT_EQ(t.part_end, std::vector<std::int32_t>{0});
  EXPECT_EQ(t.scale[0], 0x1p-15f);
  const std::vector<std::uint8_t> all(32, 5);
  BuildScanTable({32, 1, 4, zero.data(), all.data(), zero.data(), weight.data()}, &t);
  EXPECT_EQ(t.plane.size(), 128u);
  EXPECT_EQ(t.weight, std::vector<std::int16_t>(128, 0));
}

// Means that dwarf the planes make the planes coarser, not T too large.
TEST(ScanTableTest, LargeMeans) {
  const std::vector<float> q(4, 1.0f);
  const std::vector<std::uint8_t> level(4, 5);
  const std::vector<float> step(4, 1e6f);
  const std::vector<float> weight(4 * 16, 1e-3f);
  ScanTable t;
  BuildScanTable({4, 1, 8, q.data(), level.data(), step.data(), weight.data()}, &t);
  EXPECT_EQ(t.shift[0], 0);
  std::int64_t total = 255 + std::abs(t.constant[0]);
  for (const std::int32_t w : t.mean_weight) total += 127 * std::abs(w);
  EXPECT_LT(total, 1 << 24);
  EXPECT_GT(total, 1 << 23);
}

TEST(MergeAttentionTest, PartsJoinToTheWhole) {
  constexpr std::int32_t kDim = 32;
  const auto ref = MakeBackend("ref", 1);
  const auto rows = RandomRows(DataKind::kNormal, 90, kDim, 1);
  const auto q = RandomNormal(kDim, 2, 3.0);
  const auto attend = [&](std::int64_t first, std::int64_t last, float* out, float* lse) {
    const std::vector<AttendHead> heads = {
        {rows.data() + first * 2 * kDim, q.data(), nullptr, nullptr, last - first, out, lse}};
    ref->Attend({kDim, 1, 0.5f, heads});
  };
  std::vector<float> whole(kDim), joined(kDim), part(kDim);
  float whole_lse = 0, lse = 0, part_lse = 0;
  attend(0, 90, whole.data(), &whole_lse);
  attend(0, 0, joined.data(), &lse);  // the identity
  for (const auto& [first, last] : {std::pair{0, 10}, {10, 11}, {11, 11}, {11, 90}}) {
    attend(first, last, part.data(), &part_lse);
    MergeAttention(joined.data(), &lse, part.data(), part_lse, kDim);
  }
  EXPECT_TRUE(Near(joined, whole, 1e-6));
  EXPECT_NEAR(lse, whole_lse, 1e-5);
}

}  // namespace
}  // namespace fathom::test
