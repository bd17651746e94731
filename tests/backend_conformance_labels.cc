// SPDX-License-Identifier: MIT
// Every backend against `ref`: scores from labels, which are equal bit for bit.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "base/half.h"
#include "support/backend_cases.h"
#include "support/compare.h"

namespace fathom::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kUntouched = 5.0f;
constexpr Half kHalfOne = 0x3C00;

struct LabelCase {
  LabelLayout layout = LabelLayout::kTokens;
  std::int32_t planes = 4;
  std::int32_t n_channels = 32;  // read
  std::int32_t group = 4;
  std::int32_t segment_blocks = 32;
  std::vector<std::int32_t> blocks = {32, 3};  // in use in each segment
  DataKind kind = DataKind::kHeavyTailed;
};

// One KV head: any bytes are codes.
struct LabelData {
  std::vector<OffsetBuffer<std::uint8_t>> codes;
  std::vector<OffsetBuffer<Half>> scales;
  std::vector<std::int32_t> channels;  // kChannels
  OffsetBuffer<float> q{0};
  std::int64_t n_tokens = 0;
};

// kChannels: three channels to each that is read, and one more.
std::int32_t TableChannels(const LabelCase& c) {
  return c.layout == LabelLayout::kChannels ? 3 * c.n_channels + 1 : c.n_channels;
}

LabelData MakeLabels(const LabelCase& c, std::uint64_t seed) {
  LabelData data;
  Random random(seed);
  const bool named = c.layout == LabelLayout::kChannels;
  const std::int32_t table = TableChannels(c);
  const auto width = static_cast<std::size_t>(layout::LabelWidth(c.layout, c.planes, table));
  const auto segment = static_cast<std::size_t>(c.segment_blocks);
  for (const std::int32_t n_blocks : c.blocks) {
    OffsetBuffer<std::uint8_t> codes(segment * width * layout::LabelBlockBytes(c.planes));
    for (std::size_t i = 0; i < codes.size(); ++i) {
      codes[i] = static_cast<std::uint8_t>(random.Bits());
    }
    // A channel's scale is about its size times two, as that of the largest of 64 keys.
    const auto size = RandomData(c.kind, c.segment_blocks, table, seed + 1);
    OffsetBuffer<Half> scales(static_cast<std::size_t>(table) * segment);
    for (std::size_t i = 0; i < scales.size(); ++i) {
      const std::size_t transposed = i % segment * static_cast<std::size_t>(table) + i / segment;
      scales[i] = FloatToHalf(2 * std::fabs(size[transposed]));
    }
    data.codes.push_back(std::move(codes));
    data.scales.push_back(std::move(scales));
    data.n_tokens += std::int64_t{n_blocks} * kBlockTokens;
  }
  for (std::int32_t i = 0; named && i < c.n_channels; ++i) {
    data.channels.push_back((7 * i + 2) % table);
  }
  if (named && table % 7 == 0) std::iota(data.channels.begin(), data.channels.end(), 1);
  data.q = OffsetBuffer<float>(RandomNormal(std::int64_t{c.group} * c.n_channels, seed + 2));
  return data;
}

std::vector<LabelView> Views(const LabelCase& c, const LabelData& data) {
  std::vector<LabelView> views;
  for (std::size_t s = 0; s < c.blocks.size(); ++s) {
    views.push_back({data.codes[s].data(), data.scales[s].data(), c.blocks[s]});
  }
  return views;
}

// Two KV heads of the same table with different queries: [head][group][n_tokens].
std::vector<float> Scores(const Backend& backend, const LabelCase& c, const LabelData& data) {
  const std::vector<LabelView> views = Views(c, data);
  OffsetBuffer<float> other(std::vector<float>(data.q.span().rbegin(), data.q.span().rend()));
  const std::int64_t stride = data.n_tokens + 3;
  const auto size = static_cast<std::size_t>(c.group * stride);
  OffsetBuffer<float> out(2 * size, kUntouched);
  const std::int32_t* channels = data.channels.empty() ? nullptr : data.channels.data();
  const std::vector<LabelScanHead> heads = {
      {views, c.n_channels, channels, data.q.data(), out.data(), stride},
      {views, c.n_channels, channels, other.data(), out.data() + size, stride}};
  backend.ScanLabels({c.layout, c.planes, c.group, c.segment_blocks, heads});
  std::vector<float> scores;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (static_cast<std::int64_t>(i) % stride < data.n_tokens) {
      scores.push_back(out[i]);
    } else {
      EXPECT_EQ(out[i], kUntouched);
    }
  }
  return scores;
}

class BackendScanLabels : public BackendTest {
 protected:
  void Check(const LabelCase& c) {
    const LabelData data = MakeLabels(c, 21);
    EXPECT_EQ(Bits(Scores(backend(), c, data)), Bits(Scores(ref(), c, data)))
        << "layout " << static_cast<int>(c.layout) << " planes " << c.planes << " channels "
        << c.n_channels << " group " << c.group << " segments of " << c.segment_blocks;
  }
};

TEST_P(BackendScanLabels, ChannelsAndPlanes) {
  for (const std::int32_t n : {0, 1, 4, 7, 8, 9, 16, 31, 32, 33, 40, 80, 128, 256}) {
    for (const std::int32_t planes : {1, 2, 3, 4}) {
      Check({.planes = planes, .n_channels = n, .blocks = {17}});
      if (planes < 3 || n == 256) continue;
      Check({.layout = LabelLayout::kChannels, .planes = planes, .n_channels = n, .blocks = {17}});
    }
  }
  LabelCase all{.layout = LabelLayout::kChannels, .n_channels = 256, .blocks = {2}};
  Check(all);
}

TEST_P(BackendScanLabels, Groups) {
  for (std::int32_t group = 1; group <= kMaxGroup; ++group) {
    for (const LabelLayout layout : {LabelLayout::kTokens, LabelLayout::kChannels}) {
      Check({.layout = layout, .n_channels = 31, .group = group, .blocks = {3}});
    }
    Check({.planes = 2, .n_channels = 80, .group = group, .blocks = {3}});
  }
}

TEST_P(BackendScanLabels, Segments) {
  for (const LabelLayout layout : {LabelLayout::kTokens, LabelLayout::kChannels}) {
    Check({.layout = layout, .blocks = {}});
    for (const std::int32_t last : {0, 1, 3, 4, 5, 7, 8, 9, 15, 16}) {
      Check({.layout = layout, .n_channels = 16, .segment_blocks = 16, .blocks = {16, 16, last}});
    }
    Check({.layout = layout, .n_channels = 8, .segment_blocks = 64, .blocks = {64, 64, 31}});
    Check({.layout = layout, .n_channels = 8, .segment_blocks = 144, .blocks = {144, 65}});
  }
}

TEST_P(BackendScanLabels, Data) {
  for (const DataKind kind :
       {DataKind::kNormal, DataKind::kHeavyTailed, DataKind::kConstant, DataKind::kSmooth}) {
    Check({.kind = kind});
    Check({.planes = 2, .n_channels = 128, .kind = kind});
    Check({.layout = LabelLayout::kChannels, .kind = kind});
  }
}

// Products of 127 and -64 with scale 1, so that the weights are these numbers and a unit of score
// is 2^(1-t).
TEST_P(BackendScanLabels, ByHand) {
  for (const LabelLayout layout : {LabelLayout::kTokens, LabelLayout::kChannels}) {
    for (const std::int32_t planes : {2, 4}) {
      if (planes == 2 && layout == LabelLayout::kChannels) continue;
      LabelCase c{.layout = layout, .planes = planes, .n_channels = 2, .group = 1, .blocks = {1}};
      LabelData data = MakeLabels(c, 1);
      if (layout == LabelLayout::kChannels) data.channels = {0, 1};
      for (std::size_t i = 0; i < data.scales[0].size(); ++i) data.scales[0][i] = kHalfOne;
      data.q[0] = 127;
      data.q[1] = -64;
      const int most = (1 << planes) - 1;
      for (int i = 0; i < kBlockTokens; ++i) {
        for (int channel = 0; channel < 2; ++channel) {
          const layout::LabelPlace place =
              layout == LabelLayout::kTokens
                  ? layout::TokenLabel(planes, layout::LabelUnit(planes), channel, 0, i)
                  : layout::ChannelLabel(c.segment_blocks, channel, 0, i);
          const int code = (channel == 0 ? i : i / 3) & most;
          std::uint8_t& byte = data.codes[0][place.byte];
          byte = static_cast<std::uint8_t>((byte & ~(most << place.shift)) | code << place.shift);
        }
      }
      const auto scores = Scores(backend(), c, data);
      for (std::size_t i = 0; i < kBlockTokens; ++i) {
        const double half = 0.5 * most;
        const double sum =
            127 * (static_cast<double>(i & static_cast<std::size_t>(most)) - half) -
            64 * (static_cast<double>(i / 3 & static_cast<std::size_t>(most)) - half);
        EXPECT_EQ(scores[i], static_cast<float>(std::ldexp(sum, 1 - planes))) << i;
      }
    }
  }
}

// The largest sums there are: nothing overflows on the way.
TEST_P(BackendScanLabels, LargestSums) {
  for (const LabelLayout layout : {LabelLayout::kTokens, LabelLayout::kChannels}) {
    for (const std::int32_t planes : {2, 4}) {
      if (planes == 2 && layout == LabelLayout::kChannels) continue;
      for (const float q : {1.0f, -1.0f}) {
        LabelCase c{
            .layout = layout, .planes = planes, .n_channels = 256, .group = 1, .blocks = {1}};
        LabelData data = MakeLabels(c, 1);
        for (std::size_t i = 0; i < data.scales[0].size(); ++i) data.scales[0][i] = kHalfOne;
        for (std::size_t i = 0; i < data.codes[0].size(); ++i) data.codes[0][i] = 0xFF;
        for (std::size_t i = 0; i < data.q.size(); ++i) data.q[i] = q;
        const double sum = 256 * 127 * 0.5 * ((1 << planes) - 1);
        const float unit = 1.0f / 127 * std::ldexp(1.0f, 1 - planes);
        for (const float score : Scores(backend(), c, data)) {
          EXPECT_EQ(score, q * static_cast<float>(sum) * unit);
        }
      }
    }
  }
}

TEST_P(BackendScanLabels, NotANumberByPlace) {
  for (const LabelLayout layout : {LabelLayout::kTokens, LabelLayout::kChannels}) {
    LabelCase c{.layout = layout, .n_channels = 10, .group = 3, .blocks = {20}};
    LabelData data = MakeLabels(c, 3);
    const auto clean = Scores(backend(), c, data);
    data.q[10 + 4] = NAN;  // head 1; head 1 of the second KV head, too
    const std::size_t channel = layout == LabelLayout::kTokens ? 6 : data.channels[6];
    data.scales[0][channel * 32 + 9] = 0x7C00;  // block 9, all heads
    const auto dirty = Scores(backend(), c, data);
    EXPECT_EQ(Bits(dirty), Bits(Scores(ref(), c, data)));
    for (std::size_t i = 0; i < dirty.size(); ++i) {
      const bool hit = i / 1280 % 3 == 1 || i % 1280 / 64 == 9;
      EXPECT_EQ(std::isnan(dirty[i]), hit) << i;
      if (!hit) {
        EXPECT_EQ(dirty[i], clean[i]) << i;
      }
    }
    // A product of 0 and infinity is none either.
    data = MakeLabels(c, 3);
    data.scales[0][channel * 32 + 9] = 0x7C00;
    for (std::size_t h = 0; h < 3; ++h) data.q[h * 10 + 6] = 0;
    EXPECT_TRUE(std::isnan(Scores(backend(), c, data)[9 * 64]));
    for (const float q : {kInf, -kInf}) {
      data.q[0] = q;
      EXPECT_TRUE(std::isnan(Scores(backend(), c, data)[0])) << q;
    }
  }
}

TEST_P(BackendScanLabels, VanishingProductsScoreZero) {
  LabelCase c{.n_channels = 5, .group = 2, .blocks = {2}};
  LabelData data = MakeLabels(c, 3);
  for (std::size_t i = 0; i < 5; ++i) data.q[i] = i == 0 ? 0x1p-140f : 0;
  for (std::size_t i = 5; i < 10; ++i) data.q[i] = 0x1p-90f * static_cast<float>(i);
  const auto scores = Scores(backend(), c, data);
  EXPECT_EQ(Bits(scores), Bits(Scores(ref(), c, data)));
  for (std::size_t i = 0; i < 128; ++i) {
    EXPECT_EQ(scores[i], 0.0f);
    EXPECT_NE(scores[128 + i], 0.0f);
  }
}

TEST_P(BackendScanLabels, ThreadsDoNotChangeResults) {
  for (const LabelLayout layout : {LabelLayout::kTokens, LabelLayout::kChannels}) {
    const LabelCase c{.layout = layout, .blocks = {32, 32, 7}};
    const LabelData data = MakeLabels(c, 4);
    const auto one = Bits(Scores(*WithThreads(1), c, data));
    EXPECT_EQ(Bits(Scores(*WithThreads(2), c, data)), one);
    EXPECT_EQ(Bits(Scores(*WithThreads(3), c, data)), one);
  }
}

// The rounding to 8 bits against products in double, by the bound of the header.
TEST_P(BackendScanLabels, IsCloseToTheProductsThemselves) {
  const LabelCase c{.n_channels = 32, .group = 2, .blocks = {8}};
  LabelData data = MakeLabels(c, 5);
  const auto scores = Scores(backend(), c, data);
  for (std::size_t h = 0; h < 2; ++h) {
    for (std::size_t i = 0; i < 512; ++i) {
      double exact = 0, most = 0, bound = 0;
      for (int j = 0; j < 32; ++j) {
        const auto place =
            layout::TokenLabel(4, 32, j, static_cast<int>(i / 64), static_cast<int>(i % 64));
        const double value = ((data.codes[0][place.byte] >> place.shift & 15) - 7.5) / 8;
        const double p = static_cast<double>(data.q[h * 32 + static_cast<std::size_t>(j)]) *
                         HalfToFloat(data.scales[0][static_cast<std::size_t>(j) * 32 + i / 64]);
        most = std::max(most, std::fabs(p));
        exact += p * value;
        bound += std::fabs(value);
      }
      EXPECT_NEAR(scores[h * 512 + i], exact, bound * most / 254 * 1.0001);
    }
  }
}

FATHOM_TEST_ALL_BACKENDS(BackendScanLabels);

}  // namespace
}  // namespace fathom::test
