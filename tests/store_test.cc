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
#include "memory/aligned_buffer.h"
#include "memory/state_stream.h"
#include "store/codec_fit.h"
#include "store/plane_rows.h"
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

struct Case {
  Codec codec;
  std::int32_t dim, mean_bits;
  std::int32_t segment = 4;  // blocks; those of 8 share rows
};

class HeadIndexTest : public testing::TestWithParam<Case> {
 protected:
  std::int32_t segment() const { return GetParam().segment; }
  std::int64_t built() const { return segment() * 5 / 2; }  // two segments and half of one
  std::int64_t all() const { return segment() * 23 / 4; }   // five and three quarters
  HeadIndex Make(const std::vector<Half>& rows) const {
    const Case& c = GetParam();
    Moments moments(c.dim);
    const std::vector<float> keys =
        test::MappedKeys(rows, built() * kBlockTokens, RawBasis(c.dim, {}));
    moments.Add(keys.data(), built() * kBlockTokens);
    return {{c.codec, c.dim, c.mean_bits, segment()}, RawBasis(c.dim, moments.mean())};
  }
  HeadIndex Built(const std::vector<Half>& rows) const { return Built(rows, built()); }
  HeadIndex Built(const std::vector<Half>& rows, std::int64_t n_blocks) const {
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
      RandomRows(DataKind::kSmooth, all() * kBlockTokens, GetParam().dim, 11);
  const std::unique_ptr<Backend> backend_ = MakeBackend("ref", 1);
};

TEST_P(HeadIndexTest, BuildFillsSegmentsOfOneCodec) {
  const HeadIndex index = Built(rows_);
  EXPECT_EQ(index.n_blocks(), built());
  EXPECT_EQ(index.n_tokens(), built() * 64);
  ASSERT_EQ(index.segments().size(), 3u);
  for (std::size_t s = 0; s < 3; ++s) {
    const SegmentView& view = index.segments()[s];
    EXPECT_EQ(view.n_blocks, s < 2 ? segment() : segment() / 2);
    EXPECT_EQ(view.row_blocks, segment() == 8 ? 24 : segment());
    EXPECT_EQ(view.table, 0);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.planes) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.side) % 64, 0u);
  }
  EXPECT_EQ(index.codecs().size(), mean() ? 1u : 0u);
  EXPECT_EQ(index.MemoryBytes(), 3 * index.shape().SegmentBytes());
}

TEST_P(HeadIndexTest, AppendBlockByBlockEqualsAppendAtOnce) {
  HeadIndex slow = Built(rows_), fast = Built(rows_);
  for (std::int64_t n = built(); n <= all(); ++n) slow.Append(rows_.data(), n, *backend_);
  fast.Append(rows_.data(), all(), *backend_);
  ExpectSame(slow, fast);
}

TEST_P(HeadIndexTest, AppendDoesNotTouchFinishedBlocks) {
  HeadIndex index = Built(rows_);
  const std::vector<std::uint64_t> before = IndexProbe(index).Content();
  const std::uint64_t* const planes = index.segments()[0].planes;
  index.Append(rows_.data(), all(), *backend_);
  std::vector<std::uint64_t> after = IndexProbe(index).Content();
  ASSERT_GT(after.size(), before.size());
  after.resize(before.size());
  EXPECT_EQ(after, before);
  EXPECT_EQ(index.segments()[0].planes, planes) << "segments do not move";
}

TEST_P(HeadIndexTest, ANewSegmentHasTheCodecOfTheSegmentBefore) {
  HeadIndex index = Built(rows_);
  index.Append(rows_.data(), all(), *backend_);
  ASSERT_EQ(index.segments().size(), 6u);
  const std::vector<std::int32_t> tables =  // the paper codec freezes nothing
      mean() ? std::vector{0, 0, 0, 1, 2, 3} : std::vector(6, 0);
  for (std::size_t s = 0; s < 6; ++s) {
    EXPECT_EQ(index.segments()[s].table, tables[s]);
    if (tables[s] == 0) continue;
    BlockReader reader(rows_.data(), index.basis());
    const std::int64_t first = (static_cast<std::int64_t>(s) - 1) * segment();
    const MeanCodec alone =
        FitCodec(reader, first, segment(), index.shape(), {}, kMeanReachAhead, *backend_);
    const MeanCodec& codec = index.codecs()[static_cast<std::size_t>(tables[s])];
    EXPECT_EQ(codec.mean_step, alone.mean_step);
    EXPECT_EQ(codec.range, alone.range);
    EXPECT_EQ(codec.weight, alone.weight);
    EXPECT_NE(codec.range, index.codecs()[0].range);
    // Its means reach twice as far as those of an index built on the previous segment.
    HeadIndex built(index.shape(), index.basis());
    built.Build(rows_.data() + first * kBlockTokens * 2 * GetParam().dim, segment(), *backend_);
    for (std::size_t j = 0; j < codec.mean_step.size(); ++j) {
      EXPECT_NEAR(codec.mean_step[j], 2 * built.codecs()[0].mean_step[j],
                  1e-6 * codec.mean_step[j] + 2e-9);
    }
  }
}

TEST_P(HeadIndexTest, TruncateThenAppendEqualsNeverTruncated) {
  const std::vector<Half> other =
      RandomRows(DataKind::kNormal, all() * kBlockTokens, GetParam().dim, 99);
  HeadIndex whole = Built(rows_);
  whole.Append(rows_.data(), all(), *backend_);
  for (std::int64_t cut = built() - 1; cut <= all(); cut += segment() / 4) {
    HeadIndex index = Built(rows_);
    index.Append(rows_.data(), all(), *backend_);
    index.Truncate(rows_.data(), cut);
    HeadIndex fresh = Built(rows_);
    if (cut >= built()) {
      fresh.Append(rows_.data(), cut, *backend_);
      ExpectSame(index, fresh);
    }
    // Another continuation, forgotten again, leaves no trace: not even in the other half of a byte
    // of means.
    std::vector<Half> mixed = rows_;
    const std::ptrdiff_t at = cut * kBlockTokens * 2 * GetParam().dim;
    std::copy(other.begin() + at, other.end(), mixed.begin() + at);
    index.Append(mixed.data(), all(), *backend_);
    index.Truncate(mixed.data(), cut);
    index.Append(rows_.data(), all(), *backend_);
    ExpectSame(index, whole);
  }
}

TEST_P(HeadIndexTest, TruncateIntoTheBuiltPartKeepsBlocksAndCodec) {
  const HeadIndex whole = Built(rows_);
  const std::vector<std::uint64_t> content = IndexProbe(whole).Content();
  for (std::int64_t cut = 1; cut < built(); ++cut) {
    HeadIndex index = Built(rows_);
    index.Truncate(rows_.data(), cut);
    EXPECT_EQ(index.n_blocks(), cut);
    EXPECT_EQ(index.segments().size(), static_cast<std::size_t>((cut + segment() - 1) / segment()));
    std::vector<std::uint64_t> rest = IndexProbe(index).Content();
    EXPECT_TRUE(std::equal(rest.begin(), rest.end(), content.begin()));
    if (mean()) {
      ASSERT_EQ(index.codecs().size(), 1u);
      EXPECT_EQ(index.codecs()[0].weight, whole.codecs()[0].weight);
    }
    // What comes after takes the place of what was cut off, and touches nothing else.
    index.Append(rows_.data(), built(), *backend_);
    rest = IndexProbe(index).Content();
    const std::size_t kept =
        static_cast<std::size_t>(cut) * content.size() / static_cast<std::size_t>(built());
    EXPECT_TRUE(std::equal(content.begin(), content.begin() + static_cast<std::ptrdiff_t>(kept),
                           rest.begin()));
  }
}

TEST_P(HeadIndexTest, TruncateToNothingAllowsAnotherBuild) {
  HeadIndex index = Built(rows_);
  index.Append(rows_.data(), all(), *backend_);
  index.Truncate(rows_.data(), 0);
  EXPECT_EQ(index.n_blocks(), 0);
  EXPECT_EQ(index.MemoryBytes(), 0);
  EXPECT_TRUE(index.segments().empty());
  EXPECT_TRUE(index.codecs().empty());
  index.Build(rows_.data(), built(), *backend_);
  ExpectSame(index, Built(rows_));
}

TEST_P(HeadIndexTest, BuildsOfAnyLengthAroundASegment) {
  const std::int64_t s = segment();
  for (const std::int64_t n : {std::int64_t{1}, s - 1, s, s + 1, 2 * s - 1, 2 * s, 2 * s + 1}) {
    HeadIndex index = Built(rows_, n);
    EXPECT_EQ(index.segments().size(), static_cast<std::size_t>((n + s - 1) / s));
    EXPECT_EQ(index.segments().back().n_blocks, (n - 1) % s + 1);
    index.Append(rows_.data(), n + 1, *backend_);
    EXPECT_EQ(index.n_blocks(), n + 1);
    EXPECT_EQ(index.segments().size(), static_cast<std::size_t>((n + s) / s));
    EXPECT_EQ(index.segments().back().table, mean() && n % s == 0 ? 1 : 0);
  }
}

TEST_P(HeadIndexTest, MovingKeepsTheViewsValid) {
  HeadIndex index = Built(rows_);
  const std::vector<std::uint64_t> content = IndexProbe(index).Content();
  HeadIndex moved = std::move(index);
  EXPECT_EQ(IndexProbe(moved).Content(), content);
  HeadIndex other = Built(rows_, 1);
  other = std::move(moved);
  other.Append(rows_.data(), all(), *backend_);
  HeadIndex whole = Built(rows_);
  whole.Append(rows_.data(), all(), *backend_);
  ExpectSame(other, whole);
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  const std::string codec =
      c.codec == Codec::kPaper ? "Paper" : "Mean" + std::to_string(c.mean_bits);
  return codec + "D" + std::to_string(c.dim) + "S" + std::to_string(c.segment);
}

INSTANTIATE_TEST_SUITE_P(All, HeadIndexTest,
                         testing::Values(Case{Codec::kMean, 64, 4}, Case{Codec::kMean, 80, 8},
                                         Case{Codec::kMean, 128, 4}, Case{Codec::kMean, 256, 8},
                                         Case{Codec::kPaper, 128, 4}, Case{Codec::kPaper, 80, 4},
                                         Case{Codec::kMean, 64, 4, 8},
                                         Case{Codec::kPaper, 80, 4, 8}),
                         CaseName);

// Five segments of 128 blocks: a page holds the rows of four.
class SharedRows : public testing::TestWithParam<Codec> {
 protected:
  static constexpr std::int32_t kDim = 16, kSegment = 128;
  static constexpr std::int64_t kBlocks = 5 * kSegment - 3;

  HeadIndex Make(std::int32_t segment_blocks) const {
    return {{GetParam(), kDim, 4, segment_blocks}, RawBasis(kDim, {})};
  }
  HeadIndex Built(std::int32_t segment_blocks) const {
    HeadIndex index = Make(segment_blocks);
    index.Build(rows_.data(), kBlocks, *backend_);
    return index;
  }

  const std::vector<Half> rows_ = RandomRows(DataKind::kSmooth, kBlocks* kBlockTokens, kDim, 12);
  const std::unique_ptr<Backend> backend_ = MakeBackend("cpu", 1);
};

TEST_P(SharedRows, ARowOfSegmentsIsAPage) {
  const HeadIndex index = Built(kSegment);
  const auto segments = index.segments();
  ASSERT_EQ(segments.size(), 5U);
  for (std::size_t s = 0; s < 4; ++s) {
    EXPECT_EQ(segments[s].row_blocks, 4 * kSegment);
    EXPECT_EQ(segments[s].planes, segments[0].planes + s * kSegment);
  }
  EXPECT_EQ(segments[4].row_blocks, kSegment) << "it is the only one of its rows";
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(segments[0].planes) % 4096, 0U);
  EXPECT_EQ(segments[4].planes, segments[0].planes + 4 * kSegment * kDim * kPlanes);
}

TEST_P(SharedRows, HoldTheSameAsSegmentsByThemselves) {
  const HeadIndex shared = Built(kSegment), alone = Built(512);
  EXPECT_EQ(alone.segments()[0].row_blocks, 512);
  EXPECT_EQ(IndexProbe(shared).Content(), IndexProbe(alone).Content());
  if (GetParam() == Codec::kMean) {
    EXPECT_TRUE(Near(shared.Distortions(), alone.Distortions(), 1e-12));
  }
}

TEST_P(SharedRows, AreStoredAndLoadedAsSegmentsByThemselves) {
  HeadIndex index = Built(kSegment);
  StateWriter writer;
  index.Save(&writer);
  AlignedBuffer bytes(writer.bytes().size());
  std::copy(writer.bytes().begin(), writer.bytes().end(), bytes.data());
  HeadIndex loaded = Make(kSegment);
  StateReader reader({bytes.data(), bytes.size()}, nullptr, "the test's index");
  loaded.Load(&reader);
  EXPECT_EQ(loaded.segments()[0].row_blocks, kSegment);
  EXPECT_EQ(IndexProbe(loaded).Content(), IndexProbe(index).Content());
  std::vector<std::uint64_t> planes(static_cast<std::size_t>(kSegment) * kDim * kPlanes, 7);
  CopyPlanes(index.segments()[2], index.shape(), 3, 5, planes.data());
  for (std::size_t i = 0; i < planes.size(); ++i) {
    const std::size_t block = i % kSegment;
    const std::uint64_t word = loaded.segments()[2].planes[i];
    EXPECT_EQ(planes[i], block == 3 || block == 4 ? word : 7) << i;
  }
  StateWriter again;
  loaded.Save(&again);
  EXPECT_TRUE(std::ranges::equal(again.bytes(), writer.bytes()));
}

INSTANTIATE_TEST_SUITE_P(All, SharedRows, testing::Values(Codec::kMean, Codec::kPaper));

}  // namespace
}  // namespace fathom
