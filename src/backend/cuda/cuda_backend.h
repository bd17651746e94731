// SPDX-License-Identifier: MIT
// The CUDA kernels behind the interface of all backends: arguments lie in host memory, are copied
// to the device, and results come back before a call returns. Meant for tests against `ref`, for
// captures and for sessions whose rows and index are the host's; a decode step on the device uses
// the same kernels without these copies (AttentionStep in device/attention_step.h).
//
// One stream, one lock: calls from several threads run one after another.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "backend/cuda/buffer.h"
#include "backend/rest.h"
#include "fathom/backend.h"

namespace fathom {

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int n_threads) : n_threads_(n_threads) {}

  std::string_view name() const override { return "cuda"; }
  int n_threads() const override { return n_threads_; }

  void Pack(const PackArgs& args) const override;             // host_pack.cc
  void Scan(const ScanArgs& args) const override;             // host_scan.cc
  void Score(const ScoreArgs& args) const override;           // host_labels.cc
  void ScanLabels(const LabelScanArgs& args) const override;  // host_labels.cc
  void Mass(const MassArgs& args) const override;             // host_select.cc
  void Select(const SelectArgs& args) const override;         // host_select.cc
  void Rank(const RankArgs& args) const override;             // host_rank.cc
  void Attend(const AttendArgs& args) const override;         // host_rows.cc
  void Weigh(const WeighArgs& args) const override;           // host_rows.cc
  void RankAttend(const RankAttendArgs& args) const override { RankThenAttend(*this, args); }
  void Prefill(const PrefillArgs& args) const override;  // host_prefill.cc

 private:
  int n_threads_;
  mutable std::mutex mutex_;  // held by every operation for its whole length
  cuda::Stream stream_;
};

// Why no device can be used, or nothing.
std::string ProbeCuda();
std::unique_ptr<Backend> MakeCudaBackend(int n_threads);

}  // namespace fathom
