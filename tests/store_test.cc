// SPDX-License-Identifier: MIT
// Rows, shapes, and the life of an index: build, append, truncate. What the codec computes is in
// codec_test.cc.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "fathom/backend.h"
#include "fathom/error.h"
#include "fathom/store.h"
#include "store/codec_fit.h"
#include "support/compare.h"
#include "support/index_probe.h"
#include "support/random_data.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

using test::DataKind;
using test::IndexProbe;
using test::Near;
using test::RandomRows;

// --- rows
// ------------------------------------------------------------------------------------------------------------

TEST(RowStore, KeepsKeyAndValueOfATokenTogether) {
  constexpr HeadGeometry kGeometry = {.n_heads = 4, .n_kv_heads = 2, .head_dim = 16};
  RowStore store(3, kGeometry, 10);
  std::vector<float> k(4 * 2 * 16), v(k.size());
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = static_cast<float>(i) + 0.1f;  // not a half: rounds
    v[i] = -k[i];
  }
  store.Write(1, 5, 4, k.data(), v.data());
  EXPECT_EQ(store.n_tokens(), 0) << "not yet complete in all layers";
  store.Commit(9);
  EXPECT_EQ(store.n_tokens(), 9);
  for (std::int32_t h = 0; h < 2; ++h) {
    for (std::size_t i = 0; i < 4; ++i) {
      const Half* row = store.rows(1, h) + (5 + i) * 2 * 16;
      for (std::size_t j = 0; j < 16; ++j) {
        const std::size_t at = (i * 2 + static_cast<std::size_t>(h)) * 16 + j;
        EXPECT_EQ(row[j], FloatToHalf(k[at]));
        EXPECT_EQ(row[16 + j], FloatToHalf(v[at]));
      }
    }
  }
  EXPECT_EQ(store.rows(0, 0)[5 * 32], 0) << "other layers are untouched";
  EXPECT_EQ(store.rows(1, 1) - store.rows(1, 0), 64 * 2 * 16);
  EXPECT_EQ(store.rows(2, 0) - store.rows(1, 0), 2 * 64 * 2 * 16);
  store.Truncate(3);
  EXPECT_EQ(store.n_tokens(), 3);
}

// Rows of a file: read in place, private to the store.
TEST(RowStore, MapsRowsOfAFile) {
  constexpr std::int64_t kRow = 2 * 16, kStride = 128;  // halves, tokens
  const test::TempDir dir;
  std::vector<Half> content(2048 + 2 * 2 * kStride * kRow);  // behind a page of 4,096 bytes
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<Half>(i % 30000);
  const std::string path = (dir.path() / "rows").string();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(content.data()),
             static_cast<std::streamsize>(content.size() * sizeof(Half)));
  const int file = open(path.c_str(), O_RDONLY);
  ASSERT_GE(file, 0);
  RowStore store(2, {.n_heads = 2, .n_kv_heads = 2, .head_dim = 16}, 200);
  store.Map(64, 100, kStride, file, 4096);
  close(file);
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    for (std::int32_t h = 0; h < 2; ++h) {
      const Half* from = content.data() + 2048 + (layer * 2 + h) * kStride * kRow;
      EXPECT_TRUE(std::equal(from, from + 100 * kRow, store.rows(layer, h) + 64 * kRow));
      EXPECT_EQ(store.rows(layer, h)[63 * kRow], 0);
    }
  }
  const std::vector<float> ones(2 * 16, 1.0F);
  store.Write(1, 70, 1, ones.data(), ones.data());
  EXPECT_EQ(store.rows(1, 1)[70 * kRow], FloatToHalf(1.0F));
  std::ifstream in(path, std::ios::binary);
  std::vector<Half> after(content.size());
  in.read(reinterpret_cast<char*>(after.data()),
          static_cast<std::streamsize>(after.size() * sizeof(Half)));
  EXPECT_EQ(after, content);
  EXPECT_THROW(store.Map(128, 100, kStride, 0, 4096), Error);  // beyond the capacity
  EXPECT_THROW(store.Map(0, 64, kStride, -1, 4096), Error);
}

TEST(RowStore, BytesAreTheClosedForm) {
  constexpr HeadGeometry kQwen3 = {.n_heads = 32, .n_kv_heads = 8, .head_dim = 128};
  EXPECT_EQ(RowStore::Bytes(36, kQwen3, 1 << 20), std::int64_t{36} * 8 * (1 << 20) * 512);
  RowStore store(2, kQwen3, 1000);
  EXPECT_EQ(store.MemoryBytes(), 0);
  store.Commit(7);
  EXPECT_EQ(store.MemoryBytes(), 2 * 8 * 7 * 512);
}

TEST(RowStore, RefusesImpossibleShapes) {
  const auto code = [](std::int32_t layers, HeadGeometry g, std::int64_t capacity) {
    try {
      RowStore store(layers, g, capacity);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()), "");
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  EXPECT_EQ(code(0, {4, 2, 64}, 10), ErrorCode::kUsage);
  EXPECT_EQ(code(1, {5, 2, 64}, 10), ErrorCode::kUsage);
  EXPECT_EQ(code(1, {4, 0, 64}, 10), ErrorCode::kUsage);
  EXPECT_EQ(code(1, {34, 2, 64}, 10), ErrorCode::kUsage);
  EXPECT_EQ(code(1, {4, 2, 72}, 10), ErrorCode::kUsage);
  EXPECT_EQ(code(1, {4, 2, 272}, 10), ErrorCode::kUsage);
  EXPECT_EQ(code(1, {4, 2, 64}, 0), ErrorCode::kUsage);
  EXPECT_EQ(code(1, {4, 2, 64}, std::int64_t{1} << 52), ErrorCode::kNoMemory);
  EXPECT_EQ(code(1000, {4, 2, 64}, INT64_MAX), ErrorCode::kNoMemory);
}

// --- shapes
// ----------------------------------------------------------------------------------------------------------

TEST(IndexShape, BytesAreTheClosedForm) {
  constexpr std::int64_t kTokens = 64 * 64;  // of a segment
  const IndexShape mean4 = {Codec::kMean, 128, 4, 64}, mean8 = {Codec::kMean, 128, 8, 64},
                   paper = {Codec::kPaper, 128, 4, 64}, small = {Codec::kMean, 80, 4, 2};
  EXPECT_EQ(mean4.SegmentBytes(), kTokens * 65);
  EXPECT_EQ(mean8.SegmentBytes(), kTokens * 66);
  EXPECT_EQ(paper.SegmentBytes(), kTokens * 68);
  EXPECT_EQ(small.SegmentBytes(), 80 * (4 * 2 * 8 + 1));
  EXPECT_EQ(mean4.IndexBytes(0), 0);
  EXPECT_EQ(mean4.IndexBytes(1), kTokens * 65);
  EXPECT_EQ(mean4.IndexBytes(64), kTokens * 65);
  EXPECT_EQ(mean4.IndexBytes(65), kTokens * 65 * 2);
}

// --- index
// -----------------------------------------------------------------------------------------------------------

constexpr std::int32_t kSegment = 4;  // blocks
constexpr std::int64_t kBuilt = 10;   // segments of 4, 4 and 2
constexpr std::int64_t kAll = 23;     // the last segment is 5, with 3 blocks

struct Case {
  Codec codec;
  std::int32_t dim, mean_bits;
};

class HeadIndexTest : public testing::TestWithParam<Case> {
 protected:
  HeadIndex Make(const std::vector<Half>& rows) const {
    const Case& c = GetParam();
    Moments moments(c.dim);
    const std::vector<float> keys =
        test::MappedKeys(rows, kBuilt * kBlockTokens, RawBasis(c.dim, {}));
    moments.Add(keys.data(), kBuilt * kBlockTokens);
    return {{c.codec, c.dim, c.mean_bits, kSegment}, RawBasis(c.dim, moments.mean())};
  }
  HeadIndex Built(const std::vector<Half>& rows, std::int64_t n_blocks = kBuilt) const {
    HeadIndex index = Make(rows);
    index.Build(rows.data(), n_blocks, *backend_);
    return index;
  }
  bool mean() const { return GetParam().codec == Codec::kMean; }

  void ExpectSame(const HeadIndex& a, const HeadIndex& b) const {
    ASSERT_EQ(a.n_blocks(), b.n_blocks());
    ASSERT_EQ(a.segments().size(), b.segments().size());
    for (std::size_t s = 0; s < a.segments().size(); ++s) {
      EXPECT_EQ(a.segments()[s].n_blocks, b.segments()[s].n_blocks);
      EXPECT_EQ(a.segments()[s].table, b.segments()[s].table);
    }
    EXPECT_EQ(IndexProbe(a).Content(), IndexProbe(b).Content());
    ASSERT_EQ(a.codecs().size(), b.codecs().size());
    for (std::size_t c = 0; c < a.codecs().size(); ++c) {
      EXPECT_EQ(a.codecs()[c].mean_step, b.codecs()[c].mean_step);
      EXPECT_EQ(a.codecs()[c].range, b.codecs()[c].range);
      EXPECT_EQ(a.codecs()[c].weight, b.codecs()[c].weight);
    }
    EXPECT_EQ(a.MemoryBytes(), b.MemoryBytes());
    if (mean()) {
      EXPECT_TRUE(Near(a.Distortions(), b.Distortions(), 1e-12));
    }
  }

  const std::vector<Half> rows_ =
      RandomRows(DataKind::kSmooth, kAll* kBlockTokens, GetParam().dim, 11);
  const std::unique_ptr<Backend> backend_ = MakeBackend("ref", 1);
};

TEST_P(HeadIndexTest, BuildFillsSegmentsOfOneCodec) {
  const HeadIndex index = Built(rows_);
  EXPECT_EQ(index.n_blocks(), kBuilt);
  EXPECT_EQ(index.n_tokens(), kBuilt * 64);
  ASSERT_EQ(index.segments().size(), 3u);
  for (std::size_t s = 0; s < 3; ++s) {
    const SegmentView& view = index.segments()[s];
    EXPECT_EQ(view.n_blocks, s < 2 ? 4 : 2);
    EXPECT_EQ(view.table, 0);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.planes) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.side) % 64, 0u);
  }
  EXPECT_EQ(index.codecs().size(), mean() ? 1u : 0u);
  EXPECT_EQ(index.MemoryBytes(), 3 * index.shape().SegmentBytes());
}

TEST_P(HeadIndexTest, AppendBlockByBlockEqualsAppendAtOnce) {
  HeadIndex slow = Built(rows_), fast = Built(rows_);
  for (std::int64_t n = kBuilt; n <= kAll; ++n) slow.Append(rows_.data(), n, *backend_);
  fast.Append(rows_.data(), kAll, *backend_);
  ExpectSame(slow, fast);
}

TEST_P(HeadIndexTest, AppendDoesNotTouchFinishedBlocks) {
  HeadIndex index = Built(rows_);
  const std::vector<std::uint64_t> before = IndexProbe(index).Content();
  const std::uint64_t* const planes = index.segments()[0].planes;
  index.Append(rows_.data(), kAll, *backend_);
  std::vector<std::uint64_t> after = IndexProbe(index).Content();
  ASSERT_GT(after.size(), before.size());
  after.resize(before.size());
  EXPECT_EQ(after, before);
  EXPECT_EQ(index.segments()[0].planes, planes) << "segments do not move";
}

TEST_P(HeadIndexTest, ANewSegmentHasTheCodecOfTheSegmentBefore) {
  HeadIndex index = Built(rows_);
  index.Append(rows_.data(), kAll, *backend_);
  ASSERT_EQ(index.segments().size(), 6u);
  const std::vector<std::int32_t> tables =  // the paper codec freezes nothing
      mean() ? std::vector{0, 0, 0, 1, 2, 3} : std::vector(6, 0);
  for (std::size_t s = 0; s < 6; ++s) {
    EXPECT_EQ(index.segments()[s].table, tables[s]);
    if (tables[s] == 0) continue;
    BlockReader reader(rows_.data(), index.basis());
    const std::int64_t first = (static_cast<std::int64_t>(s) - 1) * kSegment;
    const MeanCodec alone =
        FitCodec(reader, first, kSegment, index.shape(), {}, kMeanReachAhead, *backend_);
    const MeanCodec& codec = index.codecs()[static_cast<std::size_t>(tables[s])];
    EXPECT_EQ(codec.mean_step, alone.mean_step);
    EXPECT_EQ(codec.range, alone.range);
    EXPECT_EQ(codec.weight, alone.weight);
    EXPECT_NE(codec.range, index.codecs()[0].range);
    // Its means reach twice as far as those of an index built on the previous segment.
    HeadIndex built(index.shape(), index.basis());
    built.Build(rows_.data() + first * kBlockTokens * 2 * GetParam().dim, kSegment, *backend_);
    for (std::size_t j = 0; j < codec.mean_step.size(); ++j) {
      EXPECT_NEAR(codec.mean_step[j], 2 * built.codecs()[0].mean_step[j],
                  1e-6 * codec.mean_step[j] + 2e-9);
    }
  }
}

TEST_P(HeadIndexTest, TruncateThenAppendEqualsNeverTruncated) {
  const std::vector<Half> other =
      RandomRows(DataKind::kNormal, kAll * kBlockTokens, GetParam().dim, 99);
  HeadIndex whole = Built(rows_);
  whole.Append(rows_.data(), kAll, *backend_);
  for (std::int64_t cut = kBuilt - 1; cut <= kAll; ++cut) {  // segments end at 12, 16 and 20
    HeadIndex index = Built(rows_);
    index.Append(rows_.data(), kAll, *backend_);
    index.Truncate(rows_.data(), cut);
    HeadIndex fresh = Built(rows_);
    if (cut >= kBuilt) {
      fresh.Append(rows_.data(), cut, *backend_);
      ExpectSame(index, fresh);
    }
    // Another continuation, forgotten again, leaves no trace: not even in the other half of a byte
    // of means.
    std::vector<Half> mixed = rows_;
    const std::ptrdiff_t at = cut * kBlockTokens * 2 * GetParam().dim;
    std::copy(other.begin() + at, other.end(), mixed.begin() + at);
    index.Append(mixed.data(), kAll, *backend_);
    index.Truncate(mixed.data(), cut);
    index.Append(rows_.data(), kAll, *backend_);
    ExpectSame(index, whole);
  }
}

TEST_P(HeadIndexTest, TruncateIntoTheBuiltPartKeepsBlocksAndCodec) {
  const HeadIndex whole = Built(rows_);
  const std::vector<std::uint64_t> content = IndexProbe(whole).Content();
  for (std::int64_t cut = 1; cut < kBuilt; ++cut) {
    HeadIndex index = Built(rows_);
    index.Truncate(rows_.data(), cut);
    EXPECT_EQ(index.n_blocks(), cut);
    EXPECT_EQ(index.segments().size(), static_cast<std::size_t>((cut + kSegment - 1) / kSegment));
    std::vector<std::uint64_t> rest = IndexProbe(index).Content();
    EXPECT_TRUE(std::equal(rest.begin(), rest.end(), content.begin()));
    if (mean()) {
      ASSERT_EQ(index.codecs().size(), 1u);
      EXPECT_EQ(index.codecs()[0].weight, whole.codecs()[0].weight);
    }
  }
}

TEST_P(HeadIndexTest, TruncateToNothingAllowsAnotherBuild) {
  HeadIndex index = Built(rows_);
  index.Append(rows_.data(), kAll, *backend_);
  index.Truncate(rows_.data(), 0);
  EXPECT_EQ(index.n_blocks(), 0);
  EXPECT_EQ(index.MemoryBytes(), 0);
  EXPECT_TRUE(index.segments().empty());
  EXPECT_TRUE(index.codecs().empty());
  index.Build(rows_.data(), kBuilt, *backend_);
  ExpectSame(index, Built(rows_));
}

TEST_P(HeadIndexTest, BuildsOfAnyLengthAroundASegment) {
  for (const std::int64_t n : {1, 3, 4, 5, 7, 8, 9}) {
    HeadIndex index = Built(rows_, n);
    EXPECT_EQ(index.segments().size(), static_cast<std::size_t>((n + 3) / 4));
    EXPECT_EQ(index.segments().back().n_blocks, (n - 1) % 4 + 1);
    index.Append(rows_.data(), n + 1, *backend_);
    EXPECT_EQ(index.n_blocks(), n + 1);
    EXPECT_EQ(index.segments().size(), static_cast<std::size_t>((n + 4) / 4));
    EXPECT_EQ(index.segments().back().table, mean() && n % 4 == 0 ? 1 : 0);
  }
}

TEST_P(HeadIndexTest, MovingKeepsTheViewsValid) {
  HeadIndex index = Built(rows_);
  const std::vector<std::uint64_t> content = IndexProbe(index).Content();
  HeadIndex moved = std::move(index);
  EXPECT_EQ(IndexProbe(moved).Content(), content);
  HeadIndex other = Built(rows_, 1);
  other = std::move(moved);
  other.Append(rows_.data(), kAll, *backend_);
  HeadIndex whole = Built(rows_);
  whole.Append(rows_.data(), kAll, *backend_);
  ExpectSame(other, whole);
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  const std::string codec =
      c.codec == Codec::kPaper ? "Paper" : "Mean" + std::to_string(c.mean_bits);
  return codec + "D" + std::to_string(c.dim);
}

INSTANTIATE_TEST_SUITE_P(All, HeadIndexTest,
                         testing::Values(Case{Codec::kMean, 64, 4}, Case{Codec::kMean, 80, 8},
                                         Case{Codec::kMean, 128, 4}, Case{Codec::kMean, 256, 8},
                                         Case{Codec::kPaper, 128, 4}, Case{Codec::kPaper, 80, 4}),
                         CaseName);

}  // namespace
}  // namespace fathom
