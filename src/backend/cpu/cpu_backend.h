// SPDX-License-Identifier: MIT
// The CPU backend: drivers that cut a call into tasks for OpenMP threads and give each to a kernel.
//
// Tasks are (KV head x range of tokens) with ranges of fixed size, and partial results are joined
// in the order of the ranges, so that the number of threads never shows in a result.
#pragma once

#include <memory>
#include <string>

#include "backend/cpu/kernels.h"
#include "fathom/backend.h"

namespace fathom {

class CpuBackend : public Backend {
 public:
  CpuBackend(const cpu::KernelTable* kernels, int n_threads);

  std::string_view name() const override { return name_; }
  int n_threads() const override { return n_threads_; }
  const cpu::KernelTable& kernels() const { return *kernels_; }

  void Pack(const PackArgs& args) const override;
  void Scan(const ScanArgs& args) const override;
  void Score(const ScoreArgs& args) const override;
  void ScanLabels(const LabelScanArgs& args) const override;
  void Mass(const MassArgs& args) const override;
  void Select(const SelectArgs& args) const override;
  void Rank(const RankArgs& args) const override;
  void Attend(const AttendArgs& args) const override;
  void Weigh(const WeighArgs& args) const override;
  void RankAttend(const RankAttendArgs& args) const override;
  void Prefill(const PrefillArgs& args) const override;

 private:
  template <typename Call, typename Fn>
  void RunTeam(int threads, Call* call, const Fn& run) const;

  // Threads of a parallel region with that many tasks. The whole team or one: libgomp ends and
  // starts threads when the size of a team changes, which costs more than idle members do, and ggml
  // uses the same team between our calls.
  int Threads(std::int64_t tasks) const { return tasks > 1 ? n_threads_ : 1; }

  const cpu::KernelTable* kernels_;
  std::string name_;
  int n_threads_;
  bool spins_;  // whether every thread has a processor: see cpu::Team
};

// Why the kernels cannot run on this machine; empty when they can.
std::string ProbeCpuAvx2();
std::string ProbeCpuAvx512();
std::string ProbeCpuAvx512Vbmi();
std::string ProbeCpuAmx();  // asks the operating system for the tile registers

std::unique_ptr<Backend> MakeCpuPortable(int n_threads);
std::unique_ptr<Backend> MakeCpuAvx2(int n_threads);
std::unique_ptr<Backend> MakeCpuAvx512(int n_threads);
std::unique_ptr<Backend> MakeCpuAvx512Vbmi(int n_threads);
std::unique_ptr<Backend> MakeCpuAvx2Masked(int n_threads);
std::unique_ptr<Backend> MakeCpuAvx512Masked(int n_threads);
std::unique_ptr<Backend> MakeCpuAmx(int n_threads);

}  // namespace fathom
