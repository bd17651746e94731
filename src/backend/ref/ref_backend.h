// SPDX-License-Identifier: MIT
// The executable specification: scalar, double accumulation, one thread, no scratch tricks. Every
// other backend is tested against it, so it is written to be obviously right and nothing else.
#pragma once

#include <memory>

#include "backend/rest.h"
#include "fathom/backend.h"

namespace fathom {

class RefBackend : public Backend {
 public:
  std::string_view name() const override { return "ref"; }
  int n_threads() const override { return 1; }

  void Pack(const PackArgs& args) const override;
  void Scan(const ScanArgs& args) const override;
  void Score(const ScoreArgs& args) const override;
  void ScanLabels(const LabelScanArgs& args) const override;
  void Mass(const MassArgs& args) const override;
  void Select(const SelectArgs& args) const override;
  void Rank(const RankArgs& args) const override;
  void Attend(const AttendArgs& args) const override;
  void Weigh(const WeighArgs& args) const override;
  void RankAttend(const RankAttendArgs& args) const override { RankThenAttend(*this, args); }
  void Prefill(const PrefillArgs& args) const override;
};

// n_threads is ignored.
std::unique_ptr<Backend> MakeRefBackend(int n_threads);

}  // namespace fathom
