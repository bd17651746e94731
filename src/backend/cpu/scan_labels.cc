// SPDX-License-Identifier: MIT
// Label scan: every score is computed by itself, so tasks are ranges of blocks of a segment.
#include <omp.h>

#include <algorithm>
#include <cassert>
#include <cstddef>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/scratch.h"

namespace fathom {
namespace {

struct LabelTask {
  const LabelScanHead* head;
  const LabelView* segment;
  std::int64_t token;  // of the segment's first score
  std::int32_t first;  // block of the segment
};

// Lists the tasks where there is a list; returns how many there are.
std::int64_t ListTasks(const LabelScanArgs& a, LabelTask* task) {
  std::int64_t n = 0;
  for (const LabelScanHead& head : a.heads) {
    std::int64_t token = 0;
    for (const LabelView& s : head.segments) {
      for (std::int32_t b = 0; b < s.n_blocks; b += cpu::kScanChunkBlocks, ++n) {
        if (task != nullptr) task[n] = {&head, &s, token, b};
      }
      token += static_cast<std::int64_t>(s.n_blocks) * kBlockTokens;
    }
  }
  return n;
}

void Run(const cpu::KernelTable& kernels, const LabelScanArgs& a, const LabelTask& task,
         std::byte* scratch) {
  const LabelScanHead& head = *task.head;
  const cpu::ScanLabelsArgs args = {
      a.layout,
      a.planes,
      a.segment_blocks,
      task.first,
      std::min(task.segment->n_blocks - task.first, cpu::kScanChunkBlocks),
      a.group,
      head.n_channels,
      task.segment->codes,
      task.segment->scales,
      head.channels,
      head.q,
      head.scores + task.token + static_cast<std::int64_t>(task.first) * kBlockTokens,
      head.stride,
      reinterpret_cast<std::int32_t*>(scratch)};
  kernels.scan_labels(&args);
}

}  // namespace

void CpuBackend::ScanLabels(const LabelScanArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup && a.planes >= 1 && a.planes <= kPlanes);
  assert(a.segment_blocks % 16 == 0 && (a.layout == LabelLayout::kTokens || a.planes > 2));
  const std::int64_t n = ListTasks(a, nullptr);
  const std::size_t list_bytes = cpu::LineBytes<LabelTask>(static_cast<std::size_t>(n));
  const int team = Threads(n);
  const std::size_t own_bytes = a.layout == LabelLayout::kChannels ? cpu::kLabelScratchBytes : 0;
  std::byte* scratch = cpu::Scratch::Take(list_bytes + static_cast<std::size_t>(team) * own_bytes);
  auto* tasks = reinterpret_cast<LabelTask*>(scratch);
  ListTasks(a, tasks);
#pragma omp parallel for schedule(dynamic) num_threads(team) if (n > 1)
  for (std::int64_t i = 0; i < n; ++i) {
    const auto thread = static_cast<std::size_t>(omp_get_thread_num());
    Run(*kernels_, a, tasks[i], scratch + list_bytes + thread * own_bytes);
  }
}

}  // namespace fathom
