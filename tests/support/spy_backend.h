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
        const ScanTable& table = head.tables.front();
        scanned_bits += static_cast<double>(table.plane.size()) +
                        static_cast<double>(table.channel.size()) * args.mean_bits / kBlockTokens;
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
  void Prefill(const PrefillArgs& args) const override { inner_->Prefill(args); }

  mutable std::vector<Attended> attended;            // of the last Attend, per KV head
  mutable double scanned_bits = 0;                   // of the last Scan, summed over KV heads
  std::function<void(const SelectArgs&)> on_select;  // before
  std::function<void(const MassArgs&)> on_mass;      // after

 private:
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
