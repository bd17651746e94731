// SPDX-License-Identifier: MIT
// The filter scans of a device at their limit: a whole step hides a token that is lost there, since
// there are about twice as many candidates as winners.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "backend/cuda/scan_mean.h"
#include "fathom/scan_table.h"
#include "store/layout.h"
#include "support/cuda_step.h"

namespace fathom::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int32_t kCap = 64;  // blocks of a piece

struct FilterCase {
  std::int32_t head_dim, group, mean_bits, n_planes;
  std::vector<std::int32_t> blocks;  // of the pieces, each with a table of its own
};

// Random planes and means of kKvHeads heads of one sequence, in pieces.
class Filter {
 public:
  explicit Filter(const FilterCase& c)
      : case_(c),
        n_blocks_(0),
        stride_(0),
        tables_(kKvHeads * static_cast<std::int32_t>(c.blocks.size()), c.head_dim, c.group),
        random_(Size(c.n_planes + c.group)) {
    for (const std::int32_t b : c.blocks) n_blocks_ += b;
    stride_ = n_blocks_ * kBlockTokens;
    scores_.resize(Size(kKvHeads * c.group * stride_));
    MakeTables();
    MakePieces();
  }

  // rank: how many scores a list has at or above its limit.
  void Expect(std::int64_t rank, bool rest);

 private:
  void MakeTables();
  void MakePieces();
  void ExpectRest(const std::vector<float>& rest, const std::vector<float>& least) const;
  bool Counts(std::int64_t token) const { return token >= first() && token < last(); }
  std::int64_t first() const { return 70; }
  std::int64_t last() const { return stride_ - 40; }

  const FilterCase case_;
  std::int64_t n_blocks_, stride_;
  cuda::MeanTableSet tables_;
  Random random_;
  std::vector<ScanTable> host_tables_;
  std::vector<std::unique_ptr<StepMemory>> memory_;
  std::vector<cuda::ScanPiece> pieces_;
  std::vector<float> scores_;  // [list][stride]
};

void Filter::MakeTables() {
  const auto dim = Size(case_.head_dim);
  std::vector<std::uint8_t> level(dim, 0);
  for (std::int32_t n = 0; n < case_.n_planes;) {
    std::uint8_t& l = level[Size(random_.Integer(0, case_.head_dim - 1))];
    if (l == kLevels - 1) continue;
    n += l == 0 ? 0 : 1;
    ++l;
  }
  for (std::int32_t h = 0; h < kKvHeads; ++h) {
    const std::vector<float> q = RandomNormal(case_.group * case_.head_dim, random_.Bits(), 2);
    for (std::size_t p = 0; p < case_.blocks.size(); ++p) {
      std::vector<float> step = RandomNormal(case_.head_dim, random_.Bits(), 0.02);
      for (float& x : step) x = std::fabs(x) + 1e-3F;
      std::vector<float> weight(dim * kPlanes * kPlanes);
      for (std::size_t i = 0; i < weight.size(); ++i) {
        weight[i] = static_cast<float>((0.3 + random_.Uniform()) *
                                       std::exp2(-1.0 - static_cast<double>(i % kPlanes)));
      }
      host_tables_.emplace_back();
      BuildScanTable({case_.head_dim, case_.group, case_.mean_bits, q.data(), level.data(),
                      step.data(), weight.data()},
                     &host_tables_.back());
    }
  }
  std::vector<const ScanTable*> all;
  for (const ScanTable& t : host_tables_) all.push_back(&t);
  const cuda::Stream stream;
  tables_.Upload(all, stream.get());
  stream.Wait();
}

void Filter::MakePieces() {
  const auto ref = MakeBackend("ref", 1);
  const auto side_row =
      static_cast<std::int64_t>(layout::SideRowBytes(Codec::kMean, case_.mean_bits, kCap));
  for (std::int32_t h = 0; h < kKvHeads; ++h) {
    std::int32_t at = 0;
    for (std::size_t p = 0; p < case_.blocks.size(); ++p) {
      std::vector<std::uint64_t> planes(Size(case_.head_dim) * kPlanes * kCap);
      std::ranges::generate(planes, [&] { return random_.Bits(); });
      std::vector<std::uint8_t> means(Size(case_.head_dim * side_row));
      std::ranges::generate(means, [&] {
        const auto code = [&](int lim) { return static_cast<int>(random_.Integer(-lim, lim)); };
        return static_cast<std::uint8_t>(case_.mean_bits == 8 ? code(127)
                                                              : (code(7) + 8) << 4 | (code(7) + 8));
      });
      const SegmentView view{planes.data(), means.data(), case_.blocks[p], 0};
      ScanHead head;
      head.segments = {&view, 1};
      head.tables = std::span(host_tables_).subspan(Size(h) * case_.blocks.size() + p, 1);
      head.scores = scores_.data() + h * case_.group * stride_ + at * kBlockTokens;
      head.stride = stride_;
      ref->Scan({Codec::kMean, case_.head_dim, case_.group, kCap, case_.mean_bits, {&head, 1}});
      memory_.push_back(std::make_unique<StepMemory>(false, planes.size() * 8));
      memory_.back()->Write(0, planes.data(), planes.size() * 8);
      const auto* device_planes = memory_.back()->as<const std::uint64_t>();
      memory_.push_back(std::make_unique<StepMemory>(false, means.size()));
      memory_.back()->Write(0, means.data(), means.size());
      pieces_.push_back(
          {device_planes, kCap, memory_.back()->as<const std::uint8_t>(), side_row, case_.blocks[p],
           at, h, static_cast<std::int32_t>(Size(h) * case_.blocks.size() + p), false, false});
      at += case_.blocks[p];
    }
  }
}

void Filter::Expect(std::int64_t rank, bool with_rest) {
  const std::int64_t n_lists = kKvHeads * case_.group, room = stride_;
  std::vector<float> least;
  std::vector<std::vector<std::uint64_t>> expected(Size(n_lists));
  for (std::int64_t l = 0; l < n_lists; ++l) {
    const float* score = scores_.data() + l * stride_;
    std::vector<float> sorted(score + first(), score + last());
    std::ranges::sort(sorted, std::greater<>());
    least.push_back(rank < 0 ? -kInf : sorted[Size(rank) - 1]);
    for (std::int64_t i = first(); i < last(); ++i) {
      if (score[i] < least.back()) continue;
      expected[Size(l)].push_back(cuda::CandidateKey(score[i], static_cast<std::int32_t>(i)));
    }
    std::ranges::sort(expected[Size(l)]);
  }
  const auto device_least = ToDevice(least);
  const auto count = ToDevice(std::vector<std::int32_t>(Size(n_lists), 0));
  const cuda::DeviceBuffer<std::uint64_t> keys(Size(n_lists * room));
  const auto rest = ToDevice(std::vector<float>(Size(n_lists * n_blocks_), -1.0F));
  const auto pieces = ToDevice(pieces_);
  const auto lengths = ToDevice(std::vector<cuda::Lengths>{
      {static_cast<std::int32_t>(stride_), static_cast<std::int32_t>(n_blocks_),
       static_cast<std::int32_t>(first()), static_cast<std::int32_t>(last()), 8}});
  cuda::MeanScan scan{};
  scan.tables = tables_.view();
  scan.mean_bits = case_.mean_bits;
  scan.n_kv_heads = kKvHeads;
  scan.pieces = pieces.data();
  scan.n_pieces = static_cast<std::int32_t>(pieces_.size());
  scan.max_tiles = kCap / cuda::kTileBlocks;
  scan.lengths = lengths.data();
  scan.sink.tile_step = 1;
  scan.sink.candidates = {keys.data(), count.data(), static_cast<std::int32_t>(room),
                          device_least.data()};
  scan.rest = with_rest ? rest.data() : nullptr;
  scan.rest_stride = n_blocks_;
  scan.exp_scale = 1.0F / std::sqrt(static_cast<float>(case_.head_dim));
  // Whole tiles are read, from the first block of every piece on.
  scan.bases_stride = n_blocks_ / cuda::kTileBlocks * cuda::kTileBlocks + 2 * cuda::kTileBlocks;
  const cuda::DeviceBuffer<std::int32_t> bases(Size(n_lists * scan.bases_stride));
  scan.bases = bases.data();
  const cuda::DeviceBuffer<std::int32_t> next_tile(pieces_.size());
  scan.next_tile = next_tile.data();
  const cuda::Stream stream;
  cuda::FillBases(scan, stream.get());
  cuda::ScanMean(scan, stream.get());
  stream.Wait();
  const auto n = ToHost(count.data(), Size(n_lists));
  for (std::size_t l = 0; l < n.size(); ++l) {
    ASSERT_EQ(Size(n[l]), expected[l].size()) << "list " << l;
    auto actual = ToHost(keys.data() + l * Size(room), Size(n[l]));
    std::ranges::sort(actual);
    EXPECT_EQ(actual, expected[l]) << "list " << l;
  }
  if (with_rest) ExpectRest(ToHost(rest.data(), Size(n_lists * n_blocks_)), least);
}

void Filter::ExpectRest(const std::vector<float>& rest, const std::vector<float>& least) const {
  const double scale = 1 / std::sqrt(static_cast<double>(case_.head_dim));
  for (std::size_t l = 0; l < least.size(); ++l) {
    for (std::int64_t b = 0; b < n_blocks_; ++b) {
      double sum = 0;
      for (std::int64_t i = b * kBlockTokens; i < (b + 1) * kBlockTokens; ++i) {
        const double above = scale * (scores_[l * Size(stride_) + Size(i)] - double{least[l]});
        if (Counts(i)) sum += std::exp(std::min(above, 0.0));
      }
      ASSERT_NEAR(rest[l * Size(n_blocks_) + Size(b)], sum, 0.02 * sum + 0.1)
          << "list " << l << ", block " << b;
    }
  }
}

TEST_F(CudaStep, CandidatesAtTheLimit) {
  for (const std::int32_t group : {1, 4, 7, 8, 16}) {
    for (const std::int32_t n_planes : {1, 3, 9, 14, 30, 45, 55, 62, 90, 150}) {
      const FilterCase c{n_planes % 2 == 0 ? 128 : 80, group, n_planes % 3 == 0 ? 4 : 8, n_planes,
                         n_planes % 4 == 1 ? std::vector<std::int32_t>{16, 30, 7}
                                           : std::vector<std::int32_t>{group + 3 * n_planes % 40}};
      SCOPED_TRACE(testing::Message() << "group " << group << ", planes " << n_planes);
      Filter filter(c);
      const std::int64_t room = 64 * std::int64_t{c.blocks[0]} - 110;
      for (const std::int64_t rank : {std::int64_t{-1}, std::min<std::int64_t>(150, room), room}) {
        if (rank == 0 || rank < -1) continue;
        filter.Expect(rank, rank > 0);
      }
    }
  }
}

}  // namespace
}  // namespace fathom::test
