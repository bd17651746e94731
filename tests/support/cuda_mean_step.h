// SPDX-License-Identifier: MIT
// A decode step of our own read on a device, from the plan to the output, and what it must equal:
// tables, winners and masks of the host, to the last bit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "backend/rest.h"
#include "device/mean_stats.h"
#include "device/scans.h"
#include "fathom/plan.h"
#include "fathom/scan_table.h"
#include "fathom/store.h"
#include "method/residual.h"
#include "store/layout.h"
#include "support/cuda_step.h"

namespace fathom::test {

// Index, values and reference of a batch. keys of a sequence are packed up to its finished blocks.
class MeanStep {
 public:
  using EditFn = std::function<void(StepRun*)>;  // of rows and queries, before anything is made

  explicit MeanStep(const StepCase& c, const EditFn& edit = {})
      : case_(c),
        run(c, 1, 5),
        plane_bytes_(c.cap_blocks() * c.head_dim * kPlanes * 8),
        mean_row_(static_cast<std::int64_t>(
            layout::SideRowBytes(Codec::kMean, c.mean_bits, static_cast<int>(c.cap_blocks())))),
        planes_(c.on_host, Size(c.n_heads() * plane_bytes_)),
        means_(false, Size(c.n_heads() * c.head_dim * mean_row_)),
        segments_(Addresses<const std::byte>(planes_, c.n_heads(), plane_bytes_)),
        value_means_(false, Size(c.n_heads() * c.cap_blocks() * c.head_dim * 2)),
        value_pointers_(
            Addresses<const Half>(value_means_, c.n_heads(), c.cap_blocks() * c.head_dim * 2)),
        mean_value_(Size(c.n_heads() * c.head_dim)),
        pieces_(Size(c.n_heads())) {
    if (edit) {
      edit(&run);
      run.WriteRows();
      run.WriteQueries();
    }
    for (std::int64_t h = 0; h < c.n_heads(); ++h) AddHead(h);
    MultiplierFit fit;
    for (std::int64_t h = 0; h < c.n_heads(); ++h)
      fit.Add(run.head_q(h), c.group, stats_.hulls[Size(h)]);
    multiplier_ = fit.Fit(c.bits);
    Upload();
    WriteIndex();
  }

  // Sequences as long as run.tokens says, in the memory that they had.
  void Grow() {
    for (std::int64_t h = 0; h < case_.n_heads(); ++h) {
      indexes_[Size(h)].Append(run.rows[Size(h)].data(), run.n_blocks(h), *cpu_);
    }
    WriteIndex();
  }

  cuda::LayerRows Rows() const {
    if (!case_.residual) return {};
    return {{}, value_pointers_.data(), mean_value_.data(), factor_device_.data()};
  }
  void Record(cudaStream_t stream) { run.Record(index_.get(), Rows(), stream); }
  StepResult Run() { return run.Run(index_.get(), Rows()); }

  void Expect(const StepResult& r) const {
    for (std::int64_t h = 0; h < case_.n_heads(); ++h) ExpectHead(r, h);
  }
  void ExpectTables() const;

 private:
  void AddHead(std::int64_t h);
  void Upload();
  void WriteIndex();
  ScanTable TableOf(std::int64_t h, std::vector<std::uint8_t>* level) const;
  void Rank(const Backend& backend, std::int64_t h, StepResult* r, std::vector<float>* rest,
            std::vector<float>* cut) const;
  void ExpectHead(const StepResult& r, std::int64_t h) const;
  void AddRest(std::int64_t h, const std::vector<float>& lse, std::vector<float>* out) const;

  const StepCase case_;

 public:
  StepRun run;

 private:
  const std::int64_t plane_bytes_, mean_row_;
  StepMemory planes_, means_;
  cuda::DeviceBuffer<const std::byte*> segments_;
  StepMemory value_means_;
  cuda::DeviceBuffer<const Half*> value_pointers_;
  cuda::DeviceBuffer<float> mean_value_;
  cuda::DeviceBuffer<cuda::ScanPiece> pieces_;
  std::unique_ptr<Backend> cpu_ = MakeBackend("cpu", 0), ref_ = MakeBackend("ref", 1);
  std::vector<HeadIndex> indexes_;
  std::vector<ValueMeans> values_;
  cuda::MeanStats stats_;
  std::vector<float> factor_;
  double multiplier_ = 0;
  cuda::DeviceMeanStats device_stats_;
  cuda::DeviceBuffer<double> multiplier_device_;
  cuda::DeviceBuffer<float> factor_device_;
  std::unique_ptr<cuda::MeanIndex> index_;
};

inline void MeanStep::AddHead(std::int64_t h) {
  const auto d = Size(case_.head_dim);
  std::vector<double> center(d, 0.0);
  const std::vector<Half>& rows = run.rows[Size(h)];
  for (std::int64_t i = 0; i < run.n_tokens(h); ++i) {
    for (std::size_t j = 0; j < d; ++j) center[j] += HalfToFloat(rows[Size(i) * 2 * d + j]);
  }
  for (double& x : center) x /= static_cast<double>(run.n_tokens(h));
  indexes_.emplace_back(IndexShape{Codec::kMean, case_.head_dim, case_.mean_bits,
                                   static_cast<std::int32_t>(case_.cap_blocks())},
                        RawBasis(case_.head_dim, center));
  indexes_.back().Build(rows.data(), run.n_blocks(h), *cpu_);
  stats_.Add(indexes_.back());
  values_.emplace_back(case_.head_dim, ResidualRule::kBlock);
  for (std::int32_t g = 0; g < case_.group; ++g) factor_.push_back(g == 2 ? 0.0F : 0.8F);
}

inline void MeanStep::Upload() {
  device_stats_ = cuda::DeviceMeanStats(stats_);
  factor_device_ = ToDevice(factor_);
  multiplier_device_ = ToDevice(std::vector<double>{multiplier_});
  index_ = std::make_unique<cuda::MeanIndex>(
      cuda::IndexSizes{case_.heads(), case_.batch(), case_.cap_blocks(), run.step().scan_lengths()},
      case_.mean_bits, multiplier_device_.data(), case_.on_host);
  index_->SetLayers({device_stats_.Layer(
      pieces_.data(), {segments_.data(), 1, static_cast<std::int32_t>(case_.cap_blocks())})});
}

// Planes, means, values and pieces: what grows.
inline void MeanStep::WriteIndex() {
  const std::int64_t blocks = case_.cap_blocks(), dim = case_.head_dim;
  std::vector<cuda::ScanPiece> pieces;
  std::vector<float> mean_value;
  for (std::int64_t h = 0; h < case_.n_heads(); ++h) {
    ASSERT_EQ(indexes_[Size(h)].segments().size(), 1U);
    const SegmentView& view = indexes_[Size(h)].segments().front();
    ASSERT_EQ(view.n_blocks, run.n_blocks(h));
    planes_.Write(Size(h * plane_bytes_), view.planes, Size(plane_bytes_));
    means_.Write(Size(h * dim * mean_row_), view.side, Size(dim * mean_row_));
    const std::uint64_t* from =
        case_.on_host
            ? index_->staged_planes() + h * dim * kPlanes * blocks
            : reinterpret_cast<const std::uint64_t*>(planes_.as<std::byte>() + h * plane_bytes_);
    pieces.push_back({from, blocks, means_.as<const std::uint8_t>() + h * dim * mean_row_,
                      mean_row_, static_cast<std::int32_t>(run.n_blocks(h)), 0,
                      static_cast<std::int32_t>(h), static_cast<std::int32_t>(h), case_.on_host,
                      false});
    ValueMeans& values = values_[Size(h)];
    values.MoveTo(run.rows[Size(h)].data(), run.n_blocks(h) * kBlockTokens, kSinks);
    value_means_.Write(Size(h * blocks * dim * 2), values.block_means(),
                       Size(run.n_blocks(h) * dim * 2));
    mean_value.insert(mean_value.end(), values.mean().begin(), values.mean().end());
  }
  cuda::Check(cudaMemcpy(pieces_.data(), pieces.data(), pieces.size() * sizeof(cuda::ScanPiece),
                         cudaMemcpyHostToDevice),
              "cudaMemcpy");
  cuda::Check(cudaMemcpy(mean_value_.data(), mean_value.data(), mean_value.size() * 4,
                         cudaMemcpyHostToDevice),
              "cudaMemcpy");
  cuda::Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

inline ScanTable MeanStep::TableOf(std::int64_t h, std::vector<std::uint8_t>* level) const {
  const float* q = run.head_q(h);
  *level = PlanAtMultiplier(q, case_.group, stats_.hulls[Size(h)], multiplier_).level;
  const MeanCodec& codec = indexes_[Size(h)].codecs().front();
  ScanTable table;
  BuildScanTable({case_.head_dim, case_.group, case_.mean_bits, q, level->data(),
                  codec.mean_step.data(), codec.weight.data()},
                 &table);
  return table;
}

inline void MeanStep::Rank(const Backend& backend, std::int64_t h, StepResult* r,
                           std::vector<float>* rest, std::vector<float>* cut) const {
  std::vector<std::uint8_t> level;
  const ScanTable table = TableOf(h, &level);
  const std::int64_t keep = case_.k - kAlwaysKept, last = run.last(h);
  const std::int64_t room = run.n_tokens(h) - last + kSinks + case_.group * keep;
  std::vector<std::int32_t> tokens(Size(room));
  std::vector<std::uint16_t> mask(tokens.size());
  std::int64_t n = 0;
  rest->assign(Size(case_.group * run.n_blocks(h)), 0.0F);
  cut->assign(Size(case_.group), 0.0F);
  RankHead head{indexes_[Size(h)].segments(),
                {&table, 1},
                tokens.data(),
                mask.data(),
                &n,
                rest->data(),
                run.n_blocks(h),
                cut->data()};
  backend.Rank({case_.head_dim,
                case_.group,
                static_cast<std::int32_t>(case_.cap_blocks()),
                case_.mean_bits,
                kSinks,
                last,
                run.n_tokens(h),
                keep,
                run.scale(),
                {&head, 1}});
  tokens.resize(Size(n));
  mask.resize(Size(n));
  r->tokens = {tokens};
  r->mask = {mask};
}

// The rest of a head as Backend::RankAttend adds it.
inline void MeanStep::AddRest(std::int64_t h, const std::vector<float>& lse,
                              std::vector<float>* out) const {
  StepResult unused;
  std::vector<float> rest, cut;
  Rank(*ref_, h, &unused, &rest, &cut);
  std::vector<std::uint8_t> level;
  TableOf(h, &level);
  const auto d = Size(case_.head_dim), n_blocks = Size(run.n_blocks(h));
  const double s = run.scale();
  std::vector<float> total(Size(case_.group)), least(total.size()), weighed(out->size());
  for (std::size_t g = 0; g < total.size(); ++g) {
    const float* q = run.head_q(h) + g * d;
    double offset = 0, noise = 0, sum = 0;
    for (std::size_t j = 0; j < d; ++j) {
      offset += static_cast<double>(q[j]) * stats_.center[Size(h) * d + j];
      noise += static_cast<double>(q[j]) * q[j] *
               stats_.distortion[(Size(h) * kLevels + level[j]) * d + j];
    }
    const double top = s * (cut[g] + offset) + s * s * noise / 2;
    const auto unit = static_cast<float>(std::exp(std::min(top - lse[g], 88.0)));
    for (std::size_t b = 0; b < n_blocks; ++b) sum += rest[g * n_blocks + b] *= unit;
    total[g] = static_cast<float>(sum);
    least[g] = kLeastBlockShare * (1 + total[g]);
  }
  const ValueMeans& values = values_[Size(h)];
  WeighHead weigh{values.block_means(), values.mean().data(), rest.data(), least.data(),
                  weighed.data()};
  ref_->Weigh({case_.head_dim, case_.group, run.n_blocks(h), {&weigh, 1}});
  for (std::size_t g = 0; g < total.size(); ++g) {
    const float factor = factor_[Size(h * case_.group) + g];
    const std::span<const float> of_head(weighed.data() + g * d, d);
    if (factor == 0.0F || !IsUsableRest(total[g], of_head)) continue;
    const float weight = 1.0F / (1.0F + factor * total[g]);
    for (std::size_t j = 0; j < d; ++j) {
      float& x = (*out)[g * d + j];
      x = x * weight + factor * weight * of_head[j];
    }
  }
}

inline void MeanStep::ExpectHead(const StepResult& r, std::int64_t h) const {
  const bool sparse = run.is_sparse(h);
  ASSERT_EQ(r.count[Size(h)] >= 0, sparse) << "head " << h;
  std::vector<float> out, lse;
  if (!sparse) {
    run.Attend(h, nullptr, nullptr, &out, &lse);
    EXPECT_TRUE(Near(r.of_head(case_, h), out, 1e-4)) << "head " << h;
    return;
  }
  StepResult expected;
  std::vector<float> rest, cut;
  Rank(*cpu_, h, &expected, &rest, &cut);
  ASSERT_EQ(r.tokens[Size(h)], expected.tokens[0]) << "head " << h << ", redo " << r.redo[Size(h)];
  ASSERT_EQ(r.mask[Size(h)], expected.mask[0]) << "head " << h;
  run.Attend(h, &expected.tokens[0], &expected.mask[0], &out, &lse);
  if (case_.residual) AddRest(h, lse, &out);
  EXPECT_TRUE(Near(r.of_head(case_, h), out, case_.residual ? 5e-3 : 1e-4)) << "head " << h;
}

// The tables that the device makes, integer by integer.
inline void MeanStep::ExpectTables() const {
  const auto n_heads = static_cast<std::int32_t>(case_.n_heads());
  const auto dim = Size(case_.head_dim), group = Size(case_.group);
  const cuda::MeanTableSet set(n_heads, case_.head_dim, case_.group);
  const cuda::DeviceBuffer<float> offset(Size(n_heads) * group), noise(Size(n_heads) * group);
  const cuda::MeanTables& t = set.view();
  StepRun& used = const_cast<StepRun&>(run);  // only for its lengths on the device
  const cuda::MeanIndex::Layer stats = device_stats_.Layer(nullptr, {});
  cuda::PlanMean(
      {n_heads, kKvHeads, 1, case_.mean_bits, run.device_q(), stats.variance, stats.slope,
       stats.level, stats.distortion, stats.center, stats.mean_step, stats.weight,
       multiplier_device_.data(), used.step().scan_lengths(), t, offset.data(), noise.data()},
      run.stream());
  cuda::Check(cudaStreamSynchronize(run.stream()), "cudaStreamSynchronize");
  const auto heads = ToHost(t.head, Size(n_heads));
  const auto plane = ToHost(t.plane, Size(n_heads) * dim * kPlanes);
  const auto weight = ToHost(t.weight, plane.size() * group);
  const auto channel = ToHost(t.channel, Size(n_heads) * dim);
  const auto mean_weight = ToHost(t.mean_weight, channel.size() * group);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    if (!run.is_sparse(static_cast<std::int64_t>(h))) continue;
    std::vector<std::uint8_t> level;
    const ScanTable e = TableOf(static_cast<std::int64_t>(h), &level);
    const cuda::MeanTableHead& a = heads[h];
    const auto part = [](const auto& all, std::size_t at, std::size_t n) {
      return std::vector<std::int32_t>(all.begin() + static_cast<std::ptrdiff_t>(at),
                                       all.begin() + static_cast<std::ptrdiff_t>(at + n));
    };
    ASSERT_EQ(Size(a.n_planes), e.plane.size());
    ASSERT_EQ(Size(a.n_channels), e.channel.size());
    ASSERT_EQ(a.n_parts, e.n_parts);
    EXPECT_EQ(part(std::span(a.part_end), 0, e.part_end.size()), e.part_end);
    EXPECT_EQ(part(plane, h * dim * kPlanes, e.plane.size()), e.plane);
    EXPECT_EQ(part(weight, h * dim * kPlanes * group, e.weight.size()),
              part(e.weight, 0, e.weight.size()));
    EXPECT_EQ(part(channel, h * dim, e.channel.size()), e.channel);
    EXPECT_EQ(part(mean_weight, h * dim * group, e.mean_weight.size()), e.mean_weight);
    EXPECT_EQ(part(std::span(a.constant), 0, group), e.constant);
    EXPECT_EQ(part(std::span(a.shift), 0, group), e.shift);
    for (std::size_t g = 0; g < group; ++g) {
      EXPECT_TRUE(a.scale[g] == e.scale[g] || (std::isnan(a.scale[g]) && std::isnan(e.scale[g])));
      for (std::size_t r = 0; r < Size(e.n_parts); ++r) {
        EXPECT_EQ(a.low[r * kMaxGroup + g], e.low[r * group + g]);
      }
    }
  }
}

}  // namespace fathom::test
