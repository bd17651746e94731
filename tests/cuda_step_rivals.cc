// SPDX-License-Identifier: MIT
// Whole decode steps of the other methods on a device against the host, and packing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "backend/cuda/pack.h"
#include "backend/cuda/plan.h"
#include "device/scans.h"
#include "fathom/label_table.h"
#include "fathom/plan.h"
#include "fathom/store.h"
#include "store/layout.h"
#include "support/cuda_step.h"

namespace fathom::test {
namespace {

using Kind = DataKind;

Basis Identity(std::int32_t dim) { return RawBasis(dim, std::vector<double>(Size(dim), 0.0)); }

cuda::IndexSizes SizesOf(const StepCase& c, std::int64_t blocks, StepRun* run) {
  return {c.heads(), c.batch(), blocks, run->step().scan_lengths()};
}

// scores(head, &stride): what the host finds, [group][stride]. Runs the step twice, alone and as a
// graph.
template <typename ScoresFn>
void ExpectSteps(StepRun* run, cuda::IndexScan* index, std::int32_t unit, double tolerance,
                 const ScoresFn& scores) {
  const StepCase& c = run->shape();
  const StepResult eager = run->Run(index);
  cuda::Graph graph(run->stream(), [&](cudaStream_t s) { run->Record(index, {}, s); });
  graph.Launch(run->stream());
  const StepResult r = run->Read();
  EXPECT_EQ(r.tokens, eager.tokens);
  EXPECT_EQ(r.mask, eager.mask);
  EXPECT_EQ(r.out, eager.out);
  for (std::int64_t h = 0; h < c.n_heads(); ++h) {
    if (!run->is_sparse(h)) continue;
    std::int64_t stride = 0;
    const std::vector<float> all = scores(h, &stride);
    ExpectWinners(*run, r, h, all, stride, unit, tolerance);
  }
  ExpectOutputs(*run, r);
}

// --- the published read -------------------------------------------------------------------------

// Depths that the device plans, against PlanPaper of the host.
void ExpectDepths(const StepRun& run, const cuda::Lengths* lengths,
                  const std::vector<double>& variance, double budget) {
  const StepCase& c = run.shape();
  const auto heads = Size(c.n_heads()), dim = Size(c.head_dim);
  const cuda::DeviceBuffer<double> var = ToDevice(variance);
  const cuda::DeviceBuffer<std::uint8_t> depth(heads * dim);
  const cuda::DeviceBuffer<std::int16_t> planes(heads * dim * kPlanes), channels(heads * dim);
  const cuda::DeviceBuffer<std::int32_t> n_planes(heads), n_channels(heads);
  cuda::PlanPaper({static_cast<std::int32_t>(heads), kKvHeads, c.group, c.head_dim, run.device_q(),
                   var.data(), budget, lengths, depth.data(), planes.data(), n_planes.data(),
                   channels.data(), n_channels.data()},
                  run.stream());
  cuda::Check(cudaStreamSynchronize(run.stream()), "cudaStreamSynchronize");
  const auto all = ToHost(depth.data(), heads * dim);
  for (std::size_t h = 0; h < heads; ++h) {
    if (!run.is_sparse(static_cast<std::int64_t>(h))) continue;
    const std::vector<std::uint8_t> actual(
        all.begin() + static_cast<std::ptrdiff_t>(h * dim),
        all.begin() + static_cast<std::ptrdiff_t>((h + 1) * dim));
    const auto expected = PlanPaper(run.head_q(static_cast<std::int64_t>(h)), c.group,
                                    std::span(variance).subspan(h * dim, dim), budget);
    EXPECT_EQ(actual, expected.depth) << "head " << h;
  }
}

void ExpectPaper(const StepCase& c, double budget) {
  SCOPED_TRACE(testing::Message() << c << ", budget " << budget);
  StepRun run(c, 1, 9);
  const auto cpu = MakeBackend("cpu", 0), ref = MakeBackend("ref", 1);
  const std::int64_t blocks = c.cap_blocks(), dim = c.head_dim;
  const std::int64_t plane_bytes = dim * kPlanes * blocks * 8, scale_bytes = dim * blocks * 2;
  StepMemory planes(c.on_host, Size(c.n_heads() * plane_bytes));
  StepMemory scales(c.on_host, Size(c.n_heads() * scale_bytes));
  cuda::PaperIndex index(SizesOf(c, blocks, &run), budget, c.on_host);
  std::vector<HeadIndex> indexes;
  std::vector<double> variance;
  std::vector<cuda::PaperPiece> pieces;
  for (std::int64_t h = 0; h < c.n_heads(); ++h) {
    const Half* rows = run.rows[Size(h)].data();
    indexes.emplace_back(
        IndexShape{Codec::kPaper, c.head_dim, 4, static_cast<std::int32_t>(blocks)},
        Identity(c.head_dim));
    indexes.back().Build(rows, run.n_blocks(h), *cpu);
    const SegmentView& view = indexes.back().segments().front();
    planes.Write(Size(h * plane_bytes), view.planes, Size(plane_bytes));
    scales.Write(Size(h * scale_bytes), view.side, Size(scale_bytes));
    Moments moments(c.head_dim);
    std::vector<float> key(Size(dim));
    for (std::int64_t i = 0; i < run.n_tokens(h); ++i) {
      std::transform(rows + i * 2 * dim, rows + i * 2 * dim + dim, key.begin(), HalfToFloat);
      moments.Add(key.data(), 1);
    }
    for (const double v : moments.Variance()) variance.push_back(v);
    pieces.push_back({c.on_host ? index.staged_planes() + h * dim * kPlanes * blocks
                                : planes.as<const std::uint64_t>() + h * plane_bytes / 8,
                      blocks,
                      c.on_host ? index.staged_scales() + h * dim * blocks
                                : scales.as<const Half>() + h * dim * blocks,
                      blocks, static_cast<std::int32_t>(run.n_blocks(h)), 0,
                      static_cast<std::int32_t>(h), c.on_host});
  }
  const auto device_pieces = ToDevice(pieces);
  const auto device_variance = ToDevice(variance);
  const auto plane_list = Addresses<const std::byte>(planes, c.n_heads(), plane_bytes);
  const auto scale_list = Addresses<const std::byte>(scales, c.n_heads(), scale_bytes);
  const auto cap = static_cast<std::int32_t>(blocks);
  index.SetLayers({{device_variance.data(),
                    device_pieces.data(),
                    {plane_list.data(), 1, cap},
                    {scale_list.data(), 1, cap}}});
  ExpectDepths(run, run.step().scan_lengths(), variance, budget);
  ExpectSteps(&run, &index, 1, 1e-5, [&](std::int64_t h, std::int64_t* stride) {
    *stride = run.n_blocks(h) * kBlockTokens;
    std::vector<float> scores(Size(c.group * *stride));
    const auto depth = PlanPaper(run.head_q(h), c.group,
                                 std::span(variance).subspan(Size(h * dim), Size(dim)), budget)
                           .depth;
    ScanHead head;
    head.segments = indexes[Size(h)].segments();
    head.q = run.head_q(h);
    head.depth = depth.data();
    head.scores = scores.data();
    head.stride = *stride;
    ref->Scan({Codec::kPaper, c.head_dim, c.group, cap, 4, {&head, 1}});
    return scores;
  });
}

TEST_F(CudaStep, PublishedRead) {
  for (const bool on_host : {false, true}) {
    ExpectPaper({Kind::kNormal, {4096 + 70}, 128, 4, 128, on_host}, 48);
    ExpectPaper({Kind::kHeavyTailed, {1100, 100, 4096 + 70}, 64, 7, 128, on_host}, 48);
    ExpectPaper({Kind::kSmooth, {20000}, 80, 1, 512, on_host}, 30);
    ExpectPaper({Kind::kNormal, {1100}, 256, 16, 128, on_host}, 150);
    ExpectPaper({Kind::kNormal, {4096 + 70}, 256, 2, 512, on_host}, 200);
  }
  ExpectPaper({Kind::kNormal, {70000}, 64, 4, 512}, 48);
  ExpectPaper({Kind::kConstant, {20000}, 64, 4, 128}, 48);
}

// --- labels -------------------------------------------------------------------------------------

// The `r` channels with the largest sum of magnitudes over the group, ascending.
std::vector<std::int32_t> BestChannels(const float* q, std::int32_t group, std::int32_t dim,
                                       std::int32_t r) {
  std::vector<float> size(Size(dim));
  for (std::int32_t h = 0; h < group; ++h) {
    for (std::int32_t j = 0; j < dim; ++j) size[Size(j)] += std::fabs(q[h * dim + j]);
  }
  std::vector<std::int32_t> order(Size(dim));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(
      order, [&](std::int32_t a, std::int32_t b) { return size[Size(a)] > size[Size(b)]; });
  order.resize(Size(r));
  std::ranges::sort(order);
  return order;
}

// n_channels: read of every key. kTokens: the first ones; kChannels: chosen by the query of all.
class LabelStep {
 public:
  LabelStep(const StepCase& c, LabelLayout layout, std::int32_t planes, std::int32_t n_channels)
      : case_(c),
        chosen_(layout == LabelLayout::kChannels),
        table_channels_(chosen_ ? c.head_dim : n_channels),
        width_(layout::LabelWidth(layout, planes, table_channels_)),
        shape_{layout, planes, n_channels, width_},
        block_bytes_(static_cast<std::int64_t>(layout::LabelBlockBytes(planes))),
        blocks_(c.cap_blocks()),
        run_(c, 1, 13),
        index_(SizesOf(c, blocks_, &run_), shape_, c.on_host),
        // Whole segments of the host's table, also where they are put together to one piece.
        n_segments_((blocks_ + kSegment - 1) / kSegment),
        codes_(c.on_host, Size(c.n_heads() * code_bytes())),
        scales_(c.on_host, Size(c.n_heads() * scale_bytes())) {
    for (std::int64_t h = 0; h < c.n_heads(); ++h) AddHead(h);
  }

  void Expect() {
    const std::int64_t n = case_.n_heads();
    const auto pieces = ToDevice(pieces_);
    // One entry per segment: heads follow each other with n_segments_ of them.
    const auto codes =
        Addresses<const std::byte>(codes_, n * n_segments_, code_bytes() / n_segments_);
    const auto scales =
        Addresses<const std::byte>(scales_, n * n_segments_, scale_bytes() / n_segments_);
    const auto segments = static_cast<std::int32_t>(n_segments_);
    index_.SetLayers(
        {{pieces.data(), {codes.data(), segments, kSegment}, {scales.data(), segments, kSegment}}});
    ExpectSteps(&run_, &index_, 1, 0,
                [&](std::int64_t h, std::int64_t* stride) { return Scores(h, stride); });
  }

 private:
  static constexpr std::int32_t kSegment = LabelTable::kSegmentBlocks;
  // Of a head.
  std::int64_t code_bytes() const { return n_segments_ * kSegment * width_ * block_bytes_; }
  std::int64_t scale_bytes() const { return n_segments_ * kSegment * table_channels_ * 2; }
  std::int64_t row_blocks() const { return case_.on_host ? blocks_ : n_segments_ * kSegment; }

  void AddHead(std::int64_t h) {
    std::vector<std::int32_t> channels(Size(table_channels_));
    std::iota(channels.begin(), channels.end(), 0);
    tables_.emplace_back(LabelShape{shape_.layout, shape_.planes, table_channels_});
    tables_.back().AppendRows(run_.rows[Size(h)].data(), Identity(case_.head_dim), channels,
                              run_.n_blocks(h), *cpu_);
    const std::int64_t code_row = kSegment * block_bytes_ * (chosen_ ? 1 : width_);
    std::int64_t s = 0;
    for (const LabelView& view : tables_.back().segments()) {
      WriteRows(&codes_, h * code_bytes(), view.codes, code_row, chosen_ ? width_ : 1, s);
      WriteRows(&scales_, h * scale_bytes(), view.scales, kSegment * 2, table_channels_, s);
      ++s;
    }
    pieces_.push_back({case_.on_host ? index_.staged_codes() + h * index_.code_bytes()
                                     : codes_.as<const std::uint8_t>() + h * code_bytes(),
                       case_.on_host ? index_.staged_scales() + h * shape_.n_channels * blocks_
                                     : scales_.as<const Half>() + h * scale_bytes() / 2,
                       static_cast<std::int32_t>(row_blocks()),
                       static_cast<std::int32_t>(run_.n_blocks(h)), 0,
                       static_cast<std::int32_t>(h)});
  }

  // Rows of segment s: as they are on the host, or each as part of a row of all segments.
  void WriteRows(StepMemory* to, std::int64_t base, const void* from, std::int64_t row_bytes,
                 std::int64_t n_rows, std::int64_t s) {
    const auto* bytes = static_cast<const std::byte*>(from);
    for (std::int64_t r = 0; r < n_rows; ++r) {
      const std::int64_t row = case_.on_host ? s * n_rows + r : r * n_segments_ + s;
      to->Write(Size(base + row * row_bytes), bytes + r * row_bytes, Size(row_bytes));
    }
  }

  std::vector<float> Scores(std::int64_t h, std::int64_t* stride) const {
    const float* q = run_.head_q(h);
    std::vector<std::int32_t> channels(Size(shape_.n_channels));
    std::iota(channels.begin(), channels.end(), 0);
    if (chosen_) channels = BestChannels(q, case_.group, case_.head_dim, shape_.n_channels);
    std::vector<float> of_channels;
    for (std::int32_t g = 0; g < case_.group; ++g) {
      for (const std::int32_t j : channels) of_channels.push_back(q[g * case_.head_dim + j]);
    }
    *stride = run_.n_blocks(h) * kBlockTokens;
    std::vector<float> scores(Size(case_.group * *stride));
    const LabelScanHead head{
        tables_[Size(h)].segments(), shape_.n_channels, chosen_ ? channels.data() : nullptr,
        of_channels.data(),          scores.data(),     *stride};
    cpu_->ScanLabels({shape_.layout, shape_.planes, case_.group, kSegment, {&head, 1}});
    return scores;
  }

  const StepCase case_;
  const bool chosen_;
  const std::int32_t table_channels_, width_;
  const cuda::LabelIndex::Shape shape_;
  const std::int64_t block_bytes_, blocks_;
  std::unique_ptr<Backend> cpu_ = MakeBackend("cpu", 0);
  StepRun run_;
  cuda::LabelIndex index_;
  const std::int64_t n_segments_;
  StepMemory codes_, scales_;
  std::vector<LabelTable> tables_;
  std::vector<cuda::LabelPiece> pieces_;
};

void ExpectLabels(const StepCase& c, LabelLayout layout, std::int32_t planes, std::int32_t n) {
  SCOPED_TRACE(testing::Message() << c << ", layout " << static_cast<int>(layout) << ", t "
                                  << planes << ", channels " << n);
  LabelStep(c, layout, planes, n).Expect();
}

TEST_F(CudaStep, LabelsByToken) {
  for (const bool on_host : {false, true}) {
    ExpectLabels({Kind::kNormal, {4096 + 70}, 128, 4, 128, on_host}, LabelLayout::kTokens, 4, 32);
    ExpectLabels({Kind::kSmooth, {1100, 100, 4096 + 70}, 64, 7, 128, on_host}, LabelLayout::kTokens,
                 2, 48);
    ExpectLabels({Kind::kHeavyTailed, {20000}, 80, 16, 512, on_host}, LabelLayout::kTokens, 4, 80);
    ExpectLabels({Kind::kNormal, {1100}, 256, 1, 512, on_host}, LabelLayout::kTokens, 2, 256);
  }
  // More equal scores than there is room for.
  ExpectLabels({Kind::kConstant, {20000}, 64, 4, 128}, LabelLayout::kTokens, 4, 32);
}

TEST_F(CudaStep, LabelsByChannel) {
  for (const bool on_host : {false, true}) {
    ExpectLabels({Kind::kNormal, {4096 + 70}, 128, 4, 128, on_host}, LabelLayout::kChannels, 4, 32);
    ExpectLabels({Kind::kHeavyTailed, {20000, 100}, 80, 8, 128, on_host}, LabelLayout::kChannels, 3,
                 16);
    ExpectLabels({Kind::kSmooth, {1100}, 256, 2, 512, on_host}, LabelLayout::kChannels, 4, 64);
  }
  ExpectLabels({Kind::kConstant, {20000}, 64, 4, 128}, LabelLayout::kChannels, 4, 32);
}

// --- keys ---------------------------------------------------------------------------------------

// chunk 1: the keys of all rows, in place; else the fp16 mean key of every `chunk` tokens.
void ExpectKeys(const StepCase& c, std::int32_t chunk) {
  SCOPED_TRACE(testing::Message() << c << ", chunk " << chunk);
  StepRun run(c, chunk, 17);
  const std::int64_t dim = c.head_dim, stride = chunk == 1 ? 2 * dim : dim;
  const std::int64_t cap =
      (c.capacity() / chunk + cuda::kTileTokens) / cuda::kTileTokens * cuda::kTileTokens;  // keys
  StepMemory table(c.on_host, Size(c.n_heads() * cap * dim * 2));
  std::vector<std::int32_t> n_keys;
  std::vector<std::vector<Half>> means;
  for (std::int64_t h = 0; h < c.n_heads(); ++h) {
    n_keys.push_back(static_cast<std::int32_t>(run.n_blocks(h) * kBlockTokens / chunk));
    std::vector<Half> mean(Size(n_keys.back() * dim));
    for (std::size_t i = 0; i < mean.size(); ++i) {
      const std::size_t key = i / Size(dim), j = i % Size(dim);
      float sum = 0;
      for (std::size_t t = 0; t < Size(chunk); ++t) {
        sum += HalfToFloat(run.rows[Size(h)][(key * Size(chunk) + t) * 2 * Size(dim) + j]);
      }
      mean[i] = FloatToHalf(sum / static_cast<float>(chunk));
    }
    table.Write(Size(h * cap * dim * 2), mean.data(), mean.size() * 2);
    means.push_back(std::move(mean));
  }
  const bool fetch = c.on_host && chunk > 1;
  const auto counts = ToDevice(n_keys);
  const auto segments = Addresses<const std::byte>(table, c.n_heads(), cap * dim * 2);
  cuda::KeyIndex index(SizesOf(c, cap / kBlockTokens, &run), chunk, stride, counts.data(),
                       *std::ranges::max_element(n_keys), fetch);
  std::vector<const Half*> staged;
  for (std::int64_t h = 0; h < c.n_heads(); ++h) {
    staged.push_back((fetch ? index.staged() : table.as<Half>()) + h * cap * dim);
  }
  const auto keys = ToDevice(staged);
  cuda::HostSegments fetched;
  if (fetch) fetched = {segments.data(), 1, static_cast<std::int32_t>(cap / kBlockTokens)};
  index.SetLayers({{chunk == 1 ? run.row_pointers() : keys.data(), fetched}}, 0);
  const auto ref = MakeBackend("ref", 1);
  ExpectSteps(&run, &index, chunk, 1e-5, [&](std::int64_t h, std::int64_t* score_stride) {
    *score_stride = n_keys[Size(h)];
    std::vector<float> scores(Size(c.group * *score_stride));
    const ScoreHead head{chunk == 1 ? run.rows[Size(h)].data() : means[Size(h)].data(),
                         run.head_q(h), scores.data(), *score_stride};
    ref->Score({c.head_dim, c.group, n_keys[Size(h)], {&head, 1}, stride});
    return scores;
  });
}

TEST_F(CudaStep, ExactKeysAndChunks) {
  for (const bool on_host : {false, true}) {
    for (const std::int32_t chunk : {1, 8}) {
      ExpectKeys({Kind::kNormal, {4096 + 70}, 128, 4, 128, on_host}, chunk);
      ExpectKeys({Kind::kHeavyTailed, {20000, 100, 1100}, 64, 7, 128, on_host}, chunk);
      ExpectKeys({Kind::kNormal, {4096 + 70}, 80, 16, 512, on_host}, chunk);
      ExpectKeys({Kind::kNormal, {1100}, 256, 1, 512, on_host}, chunk);
    }
  }
  ExpectKeys({Kind::kConstant, {20000}, 64, 4, 128}, 1);
}

// --- pack ---------------------------------------------------------------------------------------

void ExpectPack(const cuda::PackBlocks& shape, bool on_host) {
  constexpr std::int32_t kCap = 64;
  const std::int64_t dim = shape.head_dim, heads = shape.n_heads;
  const std::int64_t n = std::int64_t{shape.n_blocks} * kBlockTokens;
  const auto side_row =
      static_cast<std::int64_t>(layout::SideRowBytes(shape.codec, shape.mean_bits, kCap));
  const std::int64_t plane_bytes = dim * kPlanes * kCap * 8, side_bytes = dim * side_row;
  StepMemory rows(on_host, Size(heads * n * dim * 4));
  StepMemory planes(on_host, Size(heads * plane_bytes)), side(on_host, Size(heads * side_bytes));
  const std::vector<float> center = RandomNormal(heads * dim, 3);
  std::vector<float> step, range;
  for (const float x : RandomNormal(heads * dim, 4)) {
    step.push_back(0.05F + std::fabs(x) / 8);
    range.push_back(0.1F + std::fabs(x));
  }
  std::vector<std::byte> expected_planes(Size(heads * plane_bytes), std::byte{0x5A});
  std::vector<std::byte> expected_side(Size(heads * side_bytes), std::byte{0x5A});
  planes.Write(0, expected_planes.data(), expected_planes.size());
  side.Write(0, expected_side.data(), expected_side.size());
  const auto ref = MakeBackend("ref", 1);
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto host = RandomRows(Kind::kHeavyTailed, n, shape.head_dim, 50 + Size(h));
    rows.Write(Size(h * n * dim * 4), host.data(), host.size() * 2);
    for (std::int32_t b = 0; b < shape.n_blocks; ++b) {
      std::vector<float> x(Size(kBlockTokens * dim));
      for (std::size_t i = 0; i < x.size(); ++i) {
        const std::size_t token = Size(b) * kBlockTokens + i / Size(dim), j = i % Size(dim);
        x[i] = HalfToFloat(host[token * 2 * Size(dim) + j]) - center[Size(h * dim) + j];
      }
      ref->Pack({shape.codec, shape.head_dim, kCap, shape.mean_bits, shape.first_block + b,
                 x.data(), step.data() + h * dim, range.data() + h * dim,
                 reinterpret_cast<std::uint64_t*>(expected_planes.data() + h * plane_bytes),
                 reinterpret_cast<std::uint8_t*>(expected_side.data() + h * side_bytes)});
    }
  }
  const auto row_list = Addresses<const Half>(rows, heads, n * dim * 4);
  const auto plane_list = Addresses<std::uint64_t>(planes, heads, plane_bytes);
  const auto side_list = Addresses<std::uint8_t>(side, heads, side_bytes);
  const auto device_center = ToDevice(center), device_step = ToDevice(step),
             device_range = ToDevice(range);
  const cuda::Stream stream;
  cuda::PackBlocks pack = shape;
  pack.rows = row_list.data();
  pack.center = device_center.data();
  pack.mean_step = device_step.data();
  pack.range = device_range.data();
  pack.planes = plane_list.data();
  pack.plane_stride = kCap;
  pack.side = side_list.data();
  pack.side_stride = side_row;
  cuda::Pack(pack, stream.get());
  stream.Wait();
  const auto actual_planes = planes.Read(), actual_side = side.Read();
  EXPECT_TRUE(std::equal(expected_planes.begin(), expected_planes.end(), actual_planes.begin()));
  EXPECT_TRUE(std::equal(expected_side.begin(), expected_side.end(), actual_side.begin()));
}

TEST_F(CudaStep, PackEqualsTheHost) {
  for (const bool on_host : {false, true}) {
    for (const std::int32_t first : {0, 5, 16}) {
      for (const std::int32_t n : {1, 3, 16, 40}) {
        for (const std::int32_t mean_bits : {0, 4, 8}) {
          SCOPED_TRACE(testing::Message() << "first " << first << ", blocks " << n << ", mean bits "
                                          << mean_bits << (on_host ? ", host" : ""));
          cuda::PackBlocks shape{};
          shape.codec = mean_bits == 0 ? Codec::kPaper : Codec::kMean;
          shape.mean_bits = mean_bits;
          shape.head_dim = n == 40 ? 128 : 80;
          shape.n_heads = 3;
          shape.first_block = first;
          shape.n_blocks = n;
          ExpectPack(shape, on_host);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fathom::test
