// SPDX-License-Identifier: MIT
// Scan and exact scores: every score is computed by itself, so tasks are any ranges of tokens. A
// thread scans neighbouring ones, each of which fetches the first words of the next.
#include <omp.h>

#include <algorithm>
#include <cassert>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/mean_scanner.h"
#include "backend/cpu/scratch.h"
#include "store/layout.h"

namespace fathom {
namespace {

constexpr std::int64_t kScoreChunk = 1024;  // rows per task

struct ScanTask {
  const ScanHead* head;
  const SegmentView* segment;
  std::int64_t token;  // of the segment's first score
  std::int32_t first;  // block of the segment
  std::int32_t count;
};

std::int64_t CountTasks(const ScanArgs& a) {
  std::int64_t n = 0;
  for (const ScanHead& head : a.heads) {
    for (const SegmentView& s : head.segments) {
      n += (s.n_blocks + cpu::kScanChunkBlocks - 1) / cpu::kScanChunkBlocks;
    }
  }
  return n;
}

void ListTasks(const ScanArgs& a, ScanTask* task) {
  for (const ScanHead& head : a.heads) {
    std::int64_t token = 0;
    for (const SegmentView& s : head.segments) {
      for (std::int32_t b = 0; b < s.n_blocks; b += cpu::kScanChunkBlocks) {
        *task++ = {&head, &s, token, b, std::min(s.n_blocks - b, cpu::kScanChunkBlocks)};
      }
      token += static_cast<std::int64_t>(s.n_blocks) * kBlockTokens;
    }
  }
}

// What one thread needs to turn U of a chunk into scores.
struct ChunkScratch {
  std::uint8_t* sums;  // [group][kChunkTokens]
  std::int32_t* base;  // [group][kScanChunkBlocks]
};

constexpr std::int64_t kChunkTokens = std::int64_t{cpu::kScanChunkBlocks} * kBlockTokens;

// next: the task that this thread runs after it, or null.
void RunMean(const cpu::KernelTable& k, const ScanArgs& a, const ScanTask& task,
             const ScanTask* next, const ChunkScratch& scratch, cpu::MeanScanner* scanner) {
  const ScanHead& head = *task.head;
  const ScanTable& t = head.tables[static_cast<std::size_t>(task.segment->table)];
  const SegmentView* soon = next != nullptr && next->first == 0 ? next->segment : nullptr;
  const std::int64_t token = task.token + std::int64_t{task.first} * kBlockTokens;
  if (head.scores == nullptr && head.sums != nullptr) {
    scanner->Run(
        t, *task.segment, soon, task.first, task.count,
        {head.sums + token, head.stride, head.base + token / kBlockTokens, head.base_stride});
    return;
  }
  scanner->Run(t, *task.segment, soon, task.first, task.count,
               {scratch.sums, kChunkTokens, scratch.base, cpu::kScanChunkBlocks});
  for (std::int32_t h = 0; head.scores != nullptr && h < a.group; ++h) {
    const cpu::ScanScoresArgs args = {scratch.sums + h * kChunkTokens,
                                      scratch.base + std::ptrdiff_t{h} * cpu::kScanChunkBlocks,
                                      task.count,
                                      t.shift[static_cast<std::size_t>(h)],
                                      t.scale[static_cast<std::size_t>(h)],
                                      head.scores + token + h * head.stride};
    k.scan_scores(&args);
  }
}

void RunPaper(const cpu::KernelTable& k, const ScanArgs& a, const ScanTask& task) {
  const cpu::ScanPaperArgs args = {
      task.segment->planes,
      reinterpret_cast<const Half*>(task.segment->side),
      a.segment_blocks,
      RowBlocks(*task.segment, a.segment_blocks),
      task.first,
      task.count,
      a.group,
      a.head_dim,
      task.head->q,
      task.head->depth,
      task.head->scores + task.token + std::int64_t{task.first} * kBlockTokens,
      task.head->stride};
  k.scan_paper(&args);
}

}  // namespace

void CpuBackend::Scan(const ScanArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup && a.head_dim <= kMaxHeadDim);
  const std::int64_t n = CountTasks(a);
  const int team = Threads(n);
  const auto group = static_cast<std::size_t>(a.group);
  const std::size_t task_bytes = cpu::LineBytes<ScanTask>(static_cast<std::size_t>(n));
  const std::size_t plan_bytes = cpu::MeanScanner::PlanBytes(*kernels_, a.head_dim, a.group);
  const std::size_t sum_bytes = group * static_cast<std::size_t>(kChunkTokens);
  const std::size_t base_bytes = cpu::LineBytes<std::int32_t>(group * cpu::kScanChunkBlocks);
  const std::size_t mine_bytes =
      a.codec == Codec::kMean ? plan_bytes + sum_bytes + base_bytes : std::size_t{0};
  std::byte* scratch = cpu::Scratch::Take(task_bytes + static_cast<std::size_t>(team) * mine_bytes);
  auto* tasks = reinterpret_cast<ScanTask*>(scratch);
  ListTasks(a, tasks);
#pragma omp parallel num_threads(team) if (team > 1)
  {
    std::byte* mine =
        scratch + task_bytes + static_cast<std::size_t>(omp_get_thread_num()) * mine_bytes;
    cpu::MeanScanner scanner(*kernels_,
                             {a.group, a.segment_blocks, a.mean_bits,
                              static_cast<std::int64_t>(layout::SideBytes(
                                  Codec::kMean, a.head_dim, a.mean_bits, a.segment_blocks))},
                             mine);
    const ChunkScratch chunk = {reinterpret_cast<std::uint8_t*>(mine + plan_bytes),
                                reinterpret_cast<std::int32_t*>(mine + plan_bytes + sum_bytes)};
    const int members = omp_get_num_threads();  // a runtime may give fewer than it is asked for
    const std::int64_t begin = n * omp_get_thread_num() / members;
    const std::int64_t end = n * (omp_get_thread_num() + 1) / members;
    for (std::int64_t i = begin; i < end; ++i) {
      if (a.codec == Codec::kMean) {
        RunMean(*kernels_, a, tasks[i], i + 1 < end ? &tasks[i + 1] : nullptr, chunk, &scanner);
      } else {
        RunPaper(*kernels_, a, tasks[i]);
      }
    }
  }
}

void CpuBackend::Score(const ScoreArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup && a.head_dim <= kMaxHeadDim);
  const std::int64_t key_stride = a.key_stride == 0 ? 2 * a.head_dim : a.key_stride;
  assert(key_stride >= a.head_dim);
  const std::int64_t chunks = (a.n_tokens + kScoreChunk - 1) / kScoreChunk;
  const std::int64_t n = chunks * static_cast<std::int64_t>(a.heads.size());
#pragma omp parallel for schedule(dynamic) num_threads(Threads(n)) if (n > 1)
  for (std::int64_t i = 0; i < n; ++i) {
    const ScoreHead& head = a.heads[static_cast<std::size_t>(i / chunks)];
    const std::int64_t first = i % chunks * kScoreChunk;
    const cpu::ScoreRowsArgs args = {head.rows + first * key_stride,
                                     head.q,
                                     head.scores + first,
                                     head.stride,
                                     std::min(a.n_tokens - first, kScoreChunk),
                                     key_stride,
                                     a.head_dim,
                                     a.group};
    kernels_->score_rows(&args);
  }
}

}  // namespace fathom
