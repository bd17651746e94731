// SPDX-License-Identifier: MIT
// Labels: where codes lie, and that they are those of the paper codec's planes.

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "fathom/label_table.h"
#include "fathom/store.h"
#include "store/layout.h"
#include "support/compare.h"
#include "support/random_data.h"

namespace fathom {
namespace {

constexpr std::int32_t kDim = 48;
constexpr std::int64_t kBlocks = 70;  // a segment and some

struct Keys {
  std::vector<Half> rows = test::RandomRows(test::DataKind::kHeavyTailed, kBlocks * 64, kDim, 3);
  Basis basis = RawBasis(kDim, {});
  std::unique_ptr<Backend> backend = MakeBackend("cpu", 1);
};

layout::LabelPlace Place(const LabelShape& shape, int channel, int block, int token) {
  const int width = layout::LabelWidth(shape.layout, shape.planes, shape.n_channels);
  return shape.layout == LabelLayout::kTokens
             ? layout::TokenLabel(shape.planes, width, channel, block, token)
             : layout::ChannelLabel(LabelTable::kSegmentBlocks, channel, block, token);
}

std::vector<LabelShape> Shapes() {
  std::vector<LabelShape> shapes;
  for (const std::int32_t n : {1, 8, 17, kDim}) {
    for (std::int32_t planes = 1; planes <= kPlanes; ++planes) {
      shapes.push_back({LabelLayout::kTokens, planes, n});
      if (planes > 2) shapes.push_back({LabelLayout::kChannels, planes, n});
    }
  }
  return shapes;
}

TEST(LabelLayout, EveryCodeHasBitsOfItsOwn) {
  for (const LabelShape& shape : Shapes()) {
    constexpr int kSome = LabelTable::kSegmentBlocks;
    const int bits = layout::LabelBits(shape.planes);
    const auto width = layout::LabelWidth(shape.layout, shape.planes, shape.n_channels);
    std::set<std::size_t> taken;
    for (int c = 0; c < shape.n_channels; ++c) {
      for (int i = 0; i < kSome * kBlockTokens; ++i) {
        const auto place = Place(shape, c, i / kBlockTokens, i % kBlockTokens);
        ASSERT_EQ(place.shift % bits, 0);
        ASSERT_TRUE(taken.insert(place.byte * 8 + static_cast<std::size_t>(place.shift)).second);
      }
    }
    EXPECT_LT(*taken.rbegin(),
              8 * kSome * static_cast<std::size_t>(width) * layout::LabelBlockBytes(shape.planes));
  }
}

std::vector<std::int32_t> EveryOther(std::int32_t n) {
  std::vector<std::int32_t> channels(static_cast<std::size_t>(n));
  for (std::int32_t c = 0; c < n; ++c) channels[static_cast<std::size_t>(c)] = (3 * c + 1) % kDim;
  if (n == kDim) std::iota(channels.begin(), channels.end(), 0);
  return channels;
}

// Codes and scales of all blocks against the planes of an index.
void ExpectPlanes(const LabelTable& table, const std::vector<std::int32_t>& channels,
                  const HeadIndex& index) {
  const LabelShape& shape = table.shape();
  for (std::int64_t b = 0; b < table.n_blocks(); ++b) {
    const LabelView& labels = table.segments()[static_cast<std::size_t>(b / 64)];
    const SegmentView& planes = index.segments()[static_cast<std::size_t>(b / 64)];
    const int block = static_cast<int>(b % 64);
    const auto* scales = reinterpret_cast<const Half*>(planes.side);
    for (int c = 0; c < shape.n_channels; ++c) {
      const int channel = channels[static_cast<std::size_t>(c)];
      ASSERT_EQ(labels.scales[c * 64 + block], scales[channel * 64 + block]);
      for (int i = 0; i < kBlockTokens; ++i) {
        int code = 0;
        for (int p = 0; p < shape.planes; ++p) {
          const auto word =
              planes.planes[layout::PlaneWord(channel, p, block, RowBlocks(planes, 64))];
          code = code << 1 | static_cast<int>(word >> i & 1);
        }
        const auto place = Place(shape, c, block, i);
        const int mask = (1 << layout::LabelBits(shape.planes)) - 1;
        ASSERT_EQ(labels.codes[place.byte] >> place.shift & mask, code)
            << b << ' ' << c << ' ' << i;
      }
    }
  }
}

TEST(LabelTable, KeepsThePlanesOfThePaperCodec) {
  const Keys keys;
  HeadIndex index({Codec::kPaper, kDim, 4, 64}, keys.basis, {});
  index.Build(keys.rows.data(), kBlocks, *keys.backend, nullptr);
  for (const LabelShape& shape : Shapes()) {
    const std::vector<std::int32_t> channels = EveryOther(shape.n_channels);
    LabelTable table(shape);
    table.AppendRows(keys.rows.data(), keys.basis, channels, 66, *keys.backend);
    ASSERT_EQ(table.segments().size(), 2U);
    EXPECT_EQ(table.segments()[1].n_blocks, 2);
    for (const std::int64_t cut : {65, 64, 63, 0}) {
      table.Truncate(cut);
      EXPECT_EQ(table.n_blocks(), cut);
      EXPECT_EQ(static_cast<std::int64_t>(table.segments().size()), (cut + 63) / 64);
    }
    table.AppendRows(keys.rows.data(), keys.basis, channels, kBlocks, *keys.backend);
    ASSERT_EQ(table.n_blocks(), kBlocks);
    ExpectPlanes(table, channels, index);
  }
}

// A block that is written again leaves nothing of what was there.
TEST(LabelTable, BlocksAreOverwritten) {
  LabelTable table({LabelLayout::kTokens, 4, 3});
  const std::vector<std::uint8_t> ones(3 * 64, 15), zeros(3 * 64, 0);
  const std::vector<Half> scales(3, 0x3C00);
  table.Append(ones.data(), scales.data());
  table.Truncate(0);
  table.Append(zeros.data(), scales.data());
  for (int c = 0; c < 3; ++c) {
    for (int i = 0; i < 64; ++i) {
      const auto place = Place(table.shape(), c, 0, i);
      EXPECT_EQ(table.segments()[0].codes[place.byte] >> place.shift & 15, 0);
    }
  }
}

// The two scans of the same codes differ by the rounding of the products to 8 bits.
TEST(LabelTable, ScansAsThePlanesDo) {
  const Keys keys;
  HeadIndex index({Codec::kPaper, kDim, 4, 64}, keys.basis, {});
  index.Build(keys.rows.data(), kBlocks, *keys.backend, nullptr);
  const std::vector<float> q = test::RandomNormal(2 * kDim, 5);
  const std::int64_t n = kBlocks * 64;
  for (std::int32_t planes = 1; planes <= kPlanes; ++planes) {
    const std::vector<std::uint8_t> depth(kDim, static_cast<std::uint8_t>(planes));
    std::vector<float> expected(static_cast<std::size_t>(2 * n)), actual(expected.size());
    const ScanHead head = {index.segments(), {}, q.data(), depth.data(), expected.data(), n};
    keys.backend->Scan({Codec::kPaper, kDim, 2, 64, 4, {&head, 1}});
    LabelTable table({LabelLayout::kTokens, planes, kDim});
    table.AppendRows(keys.rows.data(), keys.basis, EveryOther(kDim), kBlocks, *keys.backend);
    const LabelScanHead labels = {table.segments(), kDim, nullptr, q.data(), actual.data(), n};
    keys.backend->ScanLabels({LabelLayout::kTokens, planes, 2, 64, {&labels, 1}});
    EXPECT_TRUE(test::Near(actual, expected, 0.02)) << planes;
  }
}

}  // namespace
}  // namespace fathom
