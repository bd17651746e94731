// SPDX-License-Identifier: MIT
// Scan and exact scores: every score is computed by itself, so tasks are any ranges of tokens.
#include <algorithm>
#include <cassert>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/scratch.h"

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

void RunMean(const cpu::KernelTable& k, const ScanArgs& a, const ScanTask& task, float* scores) {
  const ScanTable& t = task.head->tables[static_cast<std::size_t>(task.segment->table)];
  const cpu::ScanMeanArgs args = {task.segment->planes,
                                  task.segment->side,
                                  a.segment_blocks,
                                  a.mean_bits,
                                  task.first,
                                  task.count,
                                  a.group,
                                  static_cast<std::int32_t>(t.plane.size()),
                                  static_cast<std::int32_t>(t.channel.size()),
                                  t.plane.data(),
                                  t.weight.data(),
                                  t.channel.data(),
                                  t.mean_weight.data(),
                                  t.weight_sum.data(),
                                  t.scale.data(),
                                  scores,
                                  task.head->stride};
  k.scan_mean(&args);
}

void RunPaper(const cpu::KernelTable& k, const ScanArgs& a, const ScanTask& task, float* scores) {
  const cpu::ScanPaperArgs args = {
      task.segment->planes, reinterpret_cast<const Half*>(task.segment->side),
      a.segment_blocks,     task.first,
      task.count,           a.group,
      a.head_dim,           task.head->q,
      task.head->depth,     scores,
      task.head->stride};
  k.scan_paper(&args);
}

}  // namespace

void CpuBackend::Scan(const ScanArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup && a.head_dim <= kMaxHeadDim);
  const std::int64_t n = CountTasks(a);
  auto* tasks = reinterpret_cast<ScanTask*>(
      cpu::Scratch::Take(cpu::LineBytes<ScanTask>(static_cast<std::size_t>(n))));
  ListTasks(a, tasks);
#pragma omp parallel for schedule(dynamic) num_threads(Team(n)) if (n > 1)
  for (std::int64_t i = 0; i < n; ++i) {
    const ScanTask& task = tasks[i];
    float* scores =
        task.head->scores + task.token + static_cast<std::int64_t>(task.first) * kBlockTokens;
    if (a.codec == Codec::kMean) {
      RunMean(*kernels_, a, task, scores);
    } else {
      RunPaper(*kernels_, a, task, scores);
    }
  }
}

void CpuBackend::Score(const ScoreArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup && a.head_dim <= kMaxHeadDim);
  const std::int64_t key_stride = a.key_stride == 0 ? 2 * a.head_dim : a.key_stride;
  assert(key_stride >= a.head_dim);
  const std::int64_t chunks = (a.n_tokens + kScoreChunk - 1) / kScoreChunk;
  const std::int64_t n = chunks * static_cast<std::int64_t>(a.heads.size());
#pragma omp parallel for schedule(dynamic) num_threads(Team(n)) if (n > 1)
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
