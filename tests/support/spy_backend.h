// SPDX-License-Identifier: MIT
// A backend that passes every call on, remembers what was scanned and attended, and shows what was
// selected and weighed to whoever wants to see it; and dense attention, written out.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "backend/rest.h"
#include "base/half.h"
#include "fathom/backend.h"
#include "fathom/store.h"

namespace fathom::test {

class SpyBackend final : public Backend {
 public:
  struct Attended {
    std::vector<std::int32_t> tokens;  // empty for dense calls
    std::vector<std::uint16_t> mask;
  };

  explicit SpyBackend(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  std::string_view name() const override { return inner_->name(); }
  int n_threads() const override { return inner_->n_threads(); }
  void Pack(const PackArgs& args) const override { inner_->Pack(args); }
  void Scan(const ScanArgs& args) const override {
    scanned_bits = 0;
    for (const ScanHead& head : args.heads) {
      if (args.codec == Codec::kPaper) {
        for (std::int32_t j = 0; j < args.head_dim; ++j)
          scanned_bits += head.depth[j] + (head.depth[j] > 0 ? 0.25 : 0.0);
      } else {
        CountBits(head.tables.front(), args.mean_bits);
      }
    }
    inner_->Scan(args);
  }
  void Score(const ScoreArgs& args) const override { inner_->Score(args); }
  void ScanLabels(const LabelScanArgs& args) const override { inner_->ScanLabels(args); }
  void Mass(const MassArgs& args) const override {
    inner_->Mass(args);
    if (on_mass) on_mass(args);
  }
  void Select(const SelectArgs& args) const override {
    if (on_select) on_select(args);
    inner_->Select(args);
  }
  void Rank(const RankArgs& all) const override {
    RankArgs args = all;
    args.PlanHeads();
    args.planner = nullptr;
    scanned_bits = 0;
    for (const RankHead& head : args.heads) CountBits(head.tables.front(), args.mean_bits);
    if (compose_rank || on_select) {
      ComposeRank(args);
    } else {
      inner_->Rank(args);
    }
  }
  void Attend(const AttendArgs& args) const override {
    attended.clear();
    for (const AttendHead& head : args.heads) {
      Attended seen;
      if (head.tokens != nullptr) {
        seen.tokens.assign(head.tokens, head.tokens + head.n_attended);
        seen.mask.assign(head.mask, head.mask + head.n_attended);
      }
      attended.push_back(std::move(seen));
    }
    inner_->Attend(args);
  }
  void Weigh(const WeighArgs& args) const override { inner_->Weigh(args); }
  void RankAttend(const RankAttendArgs& args) const override { RankThenAttend(*this, args); }
  void Prefill(const PrefillArgs& args) const override { inner_->Prefill(args); }

  // Rank is made of Scan, Select and Mass, and so it is while on_select is set.
  bool compose_rank = false;
  mutable std::vector<Attended> attended;            // of the last Attend, per KV head
  mutable double scanned_bits = 0;                   // of the last Scan or Rank, over KV heads
  std::function<void(const SelectArgs&)> on_select;  // before
  std::function<void(const MassArgs&)> on_mass;      // after

 private:
  void CountBits(const ScanTable& table, std::int32_t mean_bits) const {
    scanned_bits += static_cast<double>(table.plane.size()) +
                    static_cast<double>(table.channel.size()) * mean_bits / kBlockTokens;
  }

  void ComposeRank(const RankArgs& a) const {
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    for (const RankHead& head : a.heads) {
      std::int64_t n = 0;
      for (const SegmentView& s : head.segments) n += s.n_blocks * std::int64_t{kBlockTokens};
      std::vector<float> scores(size(a.group * n));
      const ScanHead scan = {head.segments, head.tables, nullptr, nullptr, scores.data(), n};
      inner_->Scan({Codec::kMean, a.head_dim, a.group, a.segment_blocks, a.mean_bits, {&scan, 1}});
      std::vector<std::int32_t> winners(size(a.group * a.keep));
      const SelectHead select = {scores.data(), n,         winners.data(),
                                 head.tokens,   head.mask, head.n_attended};
      Select({a.group, a.first, a.last, a.n_tokens, a.keep, {&select, 1}});
      if (a.exp_scale == 0) continue;
      std::vector<float> shift(size(a.group)), mass(size(a.group * n / kBlockTokens));
      for (std::int32_t h = 0; h < a.group; ++h) {
        const std::int32_t* w = winners.data() + h * a.keep;
        head.cut[h] = INFINITY;
        for (std::int64_t i = 0; i < a.keep; ++i) {
          head.cut[h] = std::min(head.cut[h], scores[size(h * n + w[i])]);
        }
        shift[size(h)] = a.exp_scale * head.cut[h];
        for (std::int64_t i = a.last; i < n; ++i) scores[size(h * n + i)] = -INFINITY;
      }
      const MassHead rest = {scores.data(), n,         shift.data(),    mass.data(),
                             head.tokens,   head.mask, *head.n_attended};
      inner_->Mass({a.group, n / kBlockTokens, a.exp_scale, {&rest, 1}});
      for (std::int32_t h = 0; h < a.group; ++h) {
        std::copy_n(mass.begin() + h * n / kBlockTokens, n / kBlockTokens,
                    head.rest + h * head.rest_stride);
      }
    }
  }

  std::unique_ptr<Backend> inner_;
};

// Softmax attention of one position over tokens 0 .. n - 1 in double. q: [n_heads][D].
inline std::vector<float> DenseAttention(const RowStore& rows, std::int32_t layer, std::int64_t n,
                                         const std::vector<float>& q) {
  const HeadGeometry& heads = rows.geometry();
  const std::int32_t group = std::max(heads.group(), 1);
  const std::int64_t dim = heads.head_dim;
  std::vector<float> out(q.size());
  for (std::int64_t h = 0; h < heads.n_heads; ++h) {
    const Half* base = rows.rows(layer, static_cast<std::int32_t>(h / group));
    std::vector<double> weight(static_cast<std::size_t>(n));
    double top = -INFINITY;
    for (std::int64_t i = 0; i < n; ++i) {
      double score = 0;
      for (std::int64_t j = 0; j < dim; ++j)
        score += static_cast<double>(q[static_cast<std::size_t>(h * dim + j)]) *
                 HalfToFloat(base[i * 2 * dim + j]);
      weight[static_cast<std::size_t>(i)] = score / std::sqrt(static_cast<double>(dim));
      top = std::max(top, weight[static_cast<std::size_t>(i)]);
    }
    double sum = 0;
    for (double& w : weight) sum += w = std::exp(w - top);
    for (std::int64_t j = 0; j < dim; ++j) {
      double value = 0;
      for (std::int64_t i = 0; i < n; ++i)
        value += weight[static_cast<std::size_t>(i)] * HalfToFloat(base[i * 2 * dim + dim + j]);
      out[static_cast<std::size_t>(h * dim + j)] = static_cast<float>(value / sum);
    }
  }
  return out;
}

}  // namespace fathom::test
