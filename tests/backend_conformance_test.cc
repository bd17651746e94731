// SPDX-License-Identifier: MIT
// Every backend of this build against `ref`: packing and scanning. The other operations are in
// backend_conformance_select.cc, backend_conformance_rows.cc and backend_conformance_mass.cc of the
// same program.
#include <gtest/gtest.h>

#include "support/backend_cases.h"
#include "support/compare.h"

namespace fathom::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// --- pack ---------------------------------------------------------------------------------------

class BackendPack : public BackendTest {
 protected:
  void Check(const std::vector<float>& x, std::int32_t dim, Codec codec, int mean_bits) {
    constexpr std::int32_t kSegmentBlocks = 6;
    const OffsetBuffer<float> keys(x);
    OffsetBuffer<float> step(static_cast<std::size_t>(dim));
    OffsetBuffer<float> range(static_cast<std::size_t>(dim));
    Random random(7);
    for (std::size_t j = 0; j < step.size(); ++j) {
      step[j] = static_cast<float>(std::exp2(-6 * random.Uniform()));
      range[j] = static_cast<float>(std::exp2(3 - 6 * random.Uniform()));
    }
    for (const std::int32_t block : {0, 1, 4, 5}) {
      const std::int32_t row = block < 4 ? 0 : kSegmentBlocks + 4;  // by itself, or between others
      std::vector<std::uint64_t> planes[2];
      std::vector<std::uint8_t> side[2];
      for (int b = 0; b < 2; ++b) {
        planes[b].assign(layout::PlaneBytes(dim, std::max(row, kSegmentBlocks)) / 8,
                         0xAAAA5555AAAA5555ull);
        side[b].assign(layout::SideBytes(codec, dim, mean_bits, kSegmentBlocks), 0x5A);
        const Backend& which = b == 0 ? ref() : backend();
        which.Pack({codec, dim, kSegmentBlocks, mean_bits, block, keys.data(), step.data(),
                    range.data(), planes[b].data(), side[b].data(), row});
      }
      EXPECT_EQ(planes[1], planes[0]) << "dim " << dim << " block " << block;
      EXPECT_EQ(side[1], side[0]) << "dim " << dim << " block " << block;
    }
  }

  void CheckAll(const std::vector<float>& x, std::int32_t dim) {
    Check(x, dim, Codec::kMean, 4);
    Check(x, dim, Codec::kMean, 8);
    Check(x, dim, Codec::kPaper, 4);
  }
};

TEST_P(BackendPack, EqualsRefBitForBit) {
  for (const std::int32_t dim : {16, 64, 80, 128, 256}) {
    for (const DataKind kind :
         {DataKind::kNormal, DataKind::kHeavyTailed, DataKind::kConstant, DataKind::kSmooth}) {
      CheckAll(RandomData(kind, kBlockTokens, dim, 3), dim);
    }
  }
}

TEST_P(BackendPack, ZerosOutliersAndTinyKeys) {
  constexpr std::int32_t kDim = 48;
  std::vector<float> x(static_cast<std::size_t>(kBlockTokens) * kDim, 0.0f);
  CheckAll(x, kDim);
  x.assign(x.size(), -0.0f);
  CheckAll(x, kDim);
  x = RandomNormal(kBlockTokens * kDim, 5, 1e-9);  // scale rounds to 0 in fp16
  CheckAll(x, kDim);
  x = RandomNormal(kBlockTokens * kDim, 6);
  for (std::size_t i = 5; i < x.size(); i += kDim) x[i] *= 3e4f;  // one outlier channel
  CheckAll(x, kDim);
  for (std::size_t i = 5; i < x.size(); i += kDim) x[i] *= 1e4f;  // whose fp16 scale is inf
  CheckAll(x, kDim);
}

TEST_P(BackendPack, CellEdges) {
  constexpr std::int32_t kDim = 16;
  std::vector<float> x(static_cast<std::size_t>(kBlockTokens) * kDim);
  Random random(9);
  for (float& v : x) v = static_cast<float>(random.Integer(-64, 64)) / 8.0f;
  CheckAll(x, kDim);
}

TEST_P(BackendPack, NotANumberAndInfinityStayInTheirChannel) {
  constexpr std::int32_t kDim = 32;
  auto x = RandomNormal(kBlockTokens * kDim, 10);
  x[3 * kDim + 4] = kNaN;
  x[5 * kDim + 9] = kInf;
  x[5 * kDim + 10] = -kInf;
  x[6 * kDim + 10] = kInf;
  CheckAll(x, kDim);
}

FATHOM_TEST_ALL_BACKENDS(BackendPack);

// --- scan ---------------------------------------------------------------------------------------

class BackendScan : public BackendTest {
 protected:
  static std::vector<float> Run(const Backend& backend, const IndexCase& c,
                                std::span<const ScanHead> heads, std::int32_t group,
                                std::int64_t stride) {
    OffsetBuffer<float> out(heads.size() * static_cast<std::size_t>(group * stride), -7.0f);
    std::vector<ScanHead> placed(heads.begin(), heads.end());
    for (std::size_t h = 0; h < placed.size(); ++h) {
      placed[h].scores = out.data() + static_cast<std::int64_t>(h) * group * stride;
      placed[h].stride = stride;
    }
    backend.Scan({c.codec, c.head_dim, group, c.segment_blocks, c.mean_bits, placed});
    return {out.span().begin(), out.span().end()};
  }

  // U of every token and base of every block, one head behind the other.
  static std::vector<std::int32_t> RunIntegers(const Backend& backend, const IndexCase& c,
                                               std::span<const ScanHead> heads, std::int32_t group,
                                               std::int64_t stride) {
    const std::int64_t n = static_cast<std::int64_t>(heads.size()) * group;
    const std::int64_t base_stride = stride / kBlockTokens + 1;
    OffsetBuffer<std::uint8_t> sums(static_cast<std::size_t>(n * stride), 9);
    OffsetBuffer<std::int32_t> base(static_cast<std::size_t>(n * base_stride), -7);
    std::vector<ScanHead> placed(heads.begin(), heads.end());
    for (std::size_t h = 0; h < placed.size(); ++h) {
      placed[h].sums = sums.data() + static_cast<std::int64_t>(h) * group * stride;
      placed[h].stride = stride;
      placed[h].base = base.data() + static_cast<std::int64_t>(h) * group * base_stride;
      placed[h].base_stride = base_stride;
    }
    backend.Scan({c.codec, c.head_dim, group, c.segment_blocks, c.mean_bits, placed});
    std::vector<std::int32_t> all(sums.span().begin(), sums.span().end());
    all.insert(all.end(), base.span().begin(), base.span().end());
    return all;
  }

  // Two KV heads; every other segment reads by a table of its own.
  void CheckMean(IndexCase c, std::int32_t group, double read, int most_level) {
    c.codec = Codec::kMean;
    std::vector<TestIndex> index;
    std::vector<std::vector<ScanTable>> tables(2, std::vector<ScanTable>(2));
    std::vector<ScanHead> heads(2);
    for (std::size_t h = 0; h < 2; ++h) index.push_back(MakeIndex(c, ref(), 20 + h));
    for (std::size_t h = 0; h < 2; ++h) {
      for (std::size_t s = 0; s < index[h].views.size(); ++s) {
        index[h].views[s].table = static_cast<std::int32_t>(s % 2);
      }
      for (std::size_t t = 0; t < 2; ++t) {
        const auto q = RandomNormal(group * c.head_dim, 30 + 2 * h + t);
        const auto level = RandomLevels(c.head_dim, read, most_level, 40 + 2 * h + t);
        BuildScanTable({c.head_dim, group, c.mean_bits, q.data(), level.data(),
                        index[h].mean_step.data(), index[h].weight.data()},
                       &tables[h][t]);
      }
      heads[h].segments = index[h].views;
      heads[h].tables = tables[h];
    }
    const std::int64_t stride = index[0].n_tokens + 3;
    const auto expected = Run(ref(), c, heads, group, stride);
    const auto actual = Run(backend(), c, heads, group, stride);
    ASSERT_EQ(Bits(actual), Bits(expected)) << "dim " << c.head_dim << " group " << group;
    ASSERT_EQ(RunIntegers(backend(), c, heads, group, stride),
              RunIntegers(ref(), c, heads, group, stride))
        << "integers, dim " << c.head_dim << " group " << group;
    backend().Scan({c.codec, c.head_dim, group, c.segment_blocks, c.mean_bits, heads});  // dropped
  }

  void CheckPaper(IndexCase c, std::int32_t group) {
    c.codec = Codec::kPaper;
    const TestIndex index = MakeIndex(c, ref(), 50);
    auto depth = RandomLevels(c.head_dim, 0.5, kPlanes, 51);
    const OffsetBuffer<float> q(RandomNormal(group * c.head_dim, 52));
    std::vector<ScanHead> heads(1);
    heads[0].segments = index.views;
    heads[0].q = q.data();
    heads[0].depth = depth.data();
    const auto expected = Run(ref(), c, heads, group, index.n_tokens);
    const auto actual = Run(backend(), c, heads, group, index.n_tokens);
    EXPECT_TRUE(Near(actual, expected, 1e-5)) << "dim " << c.head_dim << " group " << group;
  }
};

TEST_P(BackendScan, MeanCodecEqualsRefBitForBit) {
  for (const std::int32_t group : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
    CheckMean({.head_dim = 64, .segment_blocks = 10, .blocks = {10, 10, 3}}, group, 0.4, 5);
  }
}

TEST_P(BackendScan, MeanCodecShapes) {
  for (const std::int32_t dim : {16, 64, 80, 128, 256}) {
    for (const int bits : {4, 8}) {
      IndexCase c{.head_dim = dim, .segment_blocks = 2, .mean_bits = bits, .blocks = {2, 1, 2, 1}};
      CheckMean(c, 4, 0.5, 5);
      c.segment_blocks = 18;
      c.blocks = {18, 17};
      CheckMean(c, 3, 0.5, 5);
    }
  }
}

// Groups of segments of one number and of another, with and without one that ends early.
TEST_P(BackendScan, SegmentsBetweenEachOthersRows) {
  for (const std::int32_t dim : {64, 80}) {
    for (const int bits : {4, 8}) {
      IndexCase c{.head_dim = dim, .mean_bits = bits, .blocks = {8, 8, 8, 8, 5}, .row_segments = 3};
      CheckMean(c, 4, 0.5, 5);
      c.segment_blocks = 66;
      c.blocks = {66, 65, 66, 1};
      CheckMean(c, 3, 0.5, 5);
    }
    CheckPaper(
        {.head_dim = dim, .segment_blocks = 18, .blocks = {18, 18, 18, 17}, .row_segments = 2}, 4);
  }
}

TEST_P(BackendScan, MeanCodecSizes) {
  CheckMean({.segment_blocks = 8, .blocks = {}}, 4, 0.5, 5);
  CheckMean({.segment_blocks = 8, .blocks = {0}}, 4, 0.5, 5);
  for (const std::int32_t blocks : {1, 7, 8, 9, 63, 64, 65, 70}) {
    CheckMean({.head_dim = 32, .segment_blocks = 70, .blocks = {blocks}}, 4, 0.5, 5);
  }
}

TEST_P(BackendScan, MeanCodecPlans) {
  const IndexCase c{.segment_blocks = 4, .blocks = {4, 2}};
  CheckMean(c, 4, 0, 1);    // nothing read: all scores 0
  CheckMean(c, 4, 1, 1);    // means only
  CheckMean(c, 4, 1.1, 5);  // everything read
  IndexCase smooth = c;
  smooth.kind = DataKind::kSmooth;
  CheckMean(smooth, 2, 0.5, 5);
  smooth.kind = DataKind::kConstant;
  CheckMean(smooth, 2, 0.5, 5);
}

// All bits set and all weights of one sign reach the limit of int16 and of T.
TEST_P(BackendScan, MeanCodecAtTheLimits) {
  for (const float sign : {1.0f, -1.0f}) {
    for (const std::int32_t dim : {16, 256}) {
      const IndexCase c{.head_dim = dim, .segment_blocks = 2, .mean_bits = 8, .blocks = {2}};
      TestIndex index = MakeIndex(c, ref(), 1);
      for (auto& word : index.planes[0]) word = ~0ull;
      for (auto& code : index.side[0]) code = 127;
      const std::vector<float> q(static_cast<std::size_t>(dim), sign);
      const std::vector<std::uint8_t> level(static_cast<std::size_t>(dim), 5);
      std::vector<ScanTable> table(1);
      BuildScanTable(
          {dim, 1, 8, q.data(), level.data(), index.mean_step.data(), index.weight.data()},
          table.data());
      std::vector<ScanHead> heads(1);
      heads[0].segments = index.views;
      heads[0].tables = table;
      const auto expected = Run(ref(), c, heads, 1, index.n_tokens);
      EXPECT_EQ(Bits(Run(backend(), c, heads, 1, index.n_tokens)), Bits(expected));
    }
  }
}

TEST_P(BackendScan, MeanCodecNotANumberQuerySpoilsItsOwnHeadOnly) {
  const IndexCase c{.segment_blocks = 2, .blocks = {2}};
  const TestIndex index = MakeIndex(c, ref(), 1);
  auto q = RandomNormal(3 * c.head_dim, 2);
  q[static_cast<std::size_t>(c.head_dim) + 3] = kNaN;
  const auto level = RandomLevels(c.head_dim, 1, 5, 3);
  std::vector<ScanTable> table(1);
  BuildScanTable(
      {c.head_dim, 3, 4, q.data(), level.data(), index.mean_step.data(), index.weight.data()},
      table.data());
  std::vector<ScanHead> heads(1);
  heads[0].segments = index.views;
  heads[0].tables = table;
  const auto n = static_cast<std::size_t>(index.n_tokens);
  const auto scores = Run(backend(), c, heads, 3, index.n_tokens);
  for (std::size_t i = 0; i < n; ++i) {
    EXPECT_TRUE(std::isfinite(scores[i]));
    EXPECT_TRUE(std::isnan(scores[n + i]));
    EXPECT_TRUE(std::isfinite(scores[2 * n + i]));
  }
}

TEST_P(BackendScan, PaperCodecIsCloseToRef) {
  for (const std::int32_t group : {1, 2, 3, 4, 7, 8, 16}) {
    CheckPaper({.head_dim = 64, .segment_blocks = 10, .blocks = {10, 3}}, group);
  }
  for (const std::int32_t dim : {16, 80, 128, 256}) {
    CheckPaper({.head_dim = dim, .segment_blocks = 18, .blocks = {18, 17}}, 4);
    CheckPaper(
        {.head_dim = dim, .segment_blocks = 2, .blocks = {1, 2, 1}, .kind = DataKind::kSmooth}, 5);
  }
  CheckPaper({.segment_blocks = 8, .blocks = {}}, 4);
  CheckPaper({.segment_blocks = 66, .blocks = {66, 1}, .kind = DataKind::kConstant}, 2);
}

TEST_P(BackendScan, ThreadsDoNotChangeResults) {
  for (const Codec codec : {Codec::kMean, Codec::kPaper}) {
    IndexCase c{.codec = codec, .head_dim = 32, .segment_blocks = 130, .blocks = {130, 77}};
    const TestIndex index = MakeIndex(c, ref(), 1);
    const auto q = RandomNormal(4 * c.head_dim, 2);
    const auto level = RandomLevels(c.head_dim, 0.7, 4, 3);
    std::vector<ScanTable> table(1);
    BuildScanTable(
        {c.head_dim, 4, 4, q.data(), level.data(), index.mean_step.data(), index.weight.data()},
        table.data());
    std::vector<ScanHead> heads(2);
    for (ScanHead& head : heads) {
      head.segments = index.views;
      head.tables = table;
      head.q = q.data();
      head.depth = level.data();
    }
    const auto one = Bits(Run(*WithThreads(1), c, heads, 4, index.n_tokens));
    EXPECT_EQ(Bits(Run(*WithThreads(2), c, heads, 4, index.n_tokens)), one);
    EXPECT_EQ(Bits(Run(*WithThreads(3), c, heads, 4, index.n_tokens)), one);
  }
}

FATHOM_TEST_ALL_BACKENDS(BackendScan);

}  // namespace
}  // namespace fathom::test
