// SPDX-License-Identifier: MIT
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "fathom/backend.h"

namespace fathom {

// Prefill by one backend, everything else by another.
class SplitBackend final : public Backend {
 public:
  SplitBackend(std::unique_ptr<Backend> prefill, std::unique_ptr<Backend> decode)
      : prefill_(std::move(prefill)),
        decode_(std::move(decode)),
        name_(std::string(prefill_->name()) + "+" + std::string(decode_->name())) {}

  std::string_view name() const override { return name_; }  // "cuda+cpu/avx512"
  int n_threads() const override { return decode_->n_threads(); }

  void Pack(const PackArgs& args) const override { decode_->Pack(args); }
  void Scan(const ScanArgs& args) const override { decode_->Scan(args); }
  void Score(const ScoreArgs& args) const override { decode_->Score(args); }
  void ScanLabels(const LabelScanArgs& args) const override { decode_->ScanLabels(args); }
  void Mass(const MassArgs& args) const override { decode_->Mass(args); }
  void Select(const SelectArgs& args) const override { decode_->Select(args); }
  void Rank(const RankArgs& args) const override { decode_->Rank(args); }
  void Attend(const AttendArgs& args) const override { decode_->Attend(args); }
  void Weigh(const WeighArgs& args) const override { decode_->Weigh(args); }
  void RankAttend(const RankAttendArgs& args) const override { decode_->RankAttend(args); }
  void Prefill(const PrefillArgs& args) const override { prefill_->Prefill(args); }

 private:
  std::unique_ptr<Backend> prefill_;
  std::unique_ptr<Backend> decode_;
  std::string name_;
};

}  // namespace fathom
