// SPDX-License-Identifier: MIT
// The calls of a decode step, each in one parallel region: Rank, Attend and Weigh by themselves,
// and all of them. What a region does is in ranker.h, attend_call.h and weigh_call.h.
#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

#include "backend/cpu/attend_call.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/ranker.h"
#include "backend/cpu/scratch.h"
#include "backend/cpu/team.h"
#include "backend/cpu/weigh_call.h"
#include "backend/rest.h"

namespace fathom {
namespace {

using cpu::Team;
using Member = cpu::Team::Member;

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

void RunAttend(const cpu::AttendCall& call, const Member& m) {
  call.Run(m.Begin(call.n_chunks()), m.End(call.n_chunks()));
  m.Wait();
  m.ForMine(call.n_query_heads(), [&](std::int64_t i) { call.Join(i); });
}

// One call of RankAttend. The rest begins with the masses: of every task of Weigh, then all
// together.
class RankAttendCall {
 public:
  RankAttendCall(const cpu::KernelTable& kernels, const RankAttendArgs& a, int threads)
      : a_(a),
        group_(a.rank.group),
        ranker_(kernels, a.rank, threads),
        attend_args_{a.rank.head_dim, group_, a.scale, a.attend, a.least_weight},
        attend_(kernels, attend_args_),
        weigh_args_{a.rank.head_dim, group_, a.n_blocks(), WeighHeads(a)},
        weigh_(kernels, weigh_args_, a.rank.heads.empty() ? 0 : a.rank.heads[0].rest_stride) {
    const RankArgs& r = a.rank;
    assert(a.attend.size() == r.heads.size());
    assert(!has_rest() || a.rest.size() == r.heads.size());
    for (const RankHead& head : r.heads) {
      assert(!has_rest() ||
             (head.rest_stride == r.heads[0].rest_stride && head.rest_stride >= a.n_blocks()));
      (void)head;
    }
    // Room for the most rows; how many they are is known later.
    const std::int64_t most =
        r.first + std::min(group_ * r.keep, r.last - r.first) + (r.n_tokens - r.last);
    for (AttendHead& head : a.attend) head.n_attended = most;
  }

  std::size_t ScratchBytes() {
    return attend_.ScratchBytes() + (has_rest() ? weigh_.ScratchBytes() + SumsBytes() : 0) +
           ranker_.ScratchBytes();
  }
  void UseScratch(std::byte* scratch) {
    attend_scratch_ = scratch;
    scratch += attend_.ScratchBytes();
    if (has_rest()) {
      weigh_.UseScratch(scratch);
      scratch += weigh_.ScratchBytes();
      sums_ = reinterpret_cast<double*>(scratch);
      scratch += SumsBytes();
    }
    ranker_.UseScratch(scratch);
  }

  void Run(const Member& m) {
    ranker_.Run(m);
    if (ranker_.failure()) return;  // of all members
    m.Wait();
    if (m.thread() == 0) {
      for (std::size_t kv = 0; kv < a_.attend.size(); ++kv) {
        a_.attend[kv].n_attended = *a_.rank.heads[kv].n_attended;
      }
      attend_.UseScratch(attend_scratch_);
    }
    m.Wait();
    RunAttend(attend_, m);
    if (!has_rest()) return;
    m.Wait();
    m.ForMine(weigh_.n_tasks(), [&](std::int64_t i) { MakeMasses(i); });
    m.Wait();
    m.ForMine(weigh_.n_tasks(), [&](std::int64_t i) { WeighTask(i); });
    m.Wait();
    m.ForMine(weigh_.n_query_heads(), [&](std::int64_t i) { Finish(i); });
  }

  const std::exception_ptr& failure() const { return ranker_.failure(); }

 private:
  bool has_rest() const { return a_.rank.exp_scale != 0; }

  static std::vector<WeighHead>& WeighHeads(const RankAttendArgs& a) {
    thread_local std::vector<WeighHead> heads;
    heads.clear();
    for (std::size_t kv = 0; a.rank.exp_scale != 0 && kv < a.rest.size(); ++kv) {
      const RestHead& head = a.rest[kv];
      heads.push_back(
          {head.means, head.mean, a.rank.heads[kv].rest, nullptr, head.rest, head.n_read});
    }
    return heads;
  }

  // Sums of masses, [tasks][stride] of which [group] are used: a line of its own for each task.
  std::int64_t SumsStride() const {
    return static_cast<std::int64_t>(cpu::LineBytes<double>(Size(group_)) / sizeof(double));
  }
  std::size_t SumsBytes() const { return Size(weigh_.n_tasks() * SumsStride()) * sizeof(double); }

  // The rest of the task's blocks becomes their mass.
  void MakeMasses(std::int64_t task) const {
    const std::size_t kv = Size(weigh_.head_of(task));
    const RankHead& ranked = a_.rank.heads[kv];
    const RestHead& head = a_.rest[kv];
    const std::int64_t n = weigh_.n_blocks(task);
    for (std::int32_t h = 0; h < group_; ++h) {
      const float scale = RestScale(a_.rank.exp_scale, ranked.cut[h], head.offset[h], head.noise[h],
                                    a_.attend[kv].lse[h]);
      float* mass = ranked.rest + h * ranked.rest_stride + weigh_.first_block(task);
      double sum = 0;
      for (std::int64_t b = 0; b < n; ++b) sum += mass[b] *= scale;
      sums_[task * SumsStride() + h] = sum;
    }
  }

  float MassOf(std::int64_t kv, std::int32_t h) const {
    const std::int64_t tasks = weigh_.n_tasks() / static_cast<std::int64_t>(a_.rest.size());
    double sum = 0;
    for (std::int64_t i = kv * tasks; i < (kv + 1) * tasks; ++i) sum += sums_[i * SumsStride() + h];
    return static_cast<float>(sum);
  }

  void WeighTask(std::int64_t task) const {
    float least[kMaxGroup];
    for (std::int32_t h = 0; h < group_; ++h) {
      least[h] = a_.least_share * (1 + MassOf(weigh_.head_of(task), h));
    }
    weigh_.Run(task, least);
  }

  void Finish(std::int64_t query_head) const {
    const std::int64_t kv = query_head / group_;
    const auto h = static_cast<std::int32_t>(query_head % group_);
    const RestHead& head = a_.rest[Size(kv)];
    const std::int32_t dim = a_.rank.head_dim;
    weigh_.Join(query_head);
    head.mass[h] = MassOf(kv, h);
    AddRest(a_.attend[Size(kv)].out + h * dim, head.rest + h * dim, head.mass[h], head.factor[h],
            dim);
  }

  const RankAttendArgs& a_;
  const std::int32_t group_;
  cpu::Ranker ranker_;
  const AttendArgs attend_args_;
  cpu::AttendCall attend_;
  const WeighArgs weigh_args_;
  cpu::WeighCall weigh_;
  std::byte* attend_scratch_ = nullptr;
  double* sums_ = nullptr;
};

}  // namespace

// run(member) by a team of that many threads, after call->UseScratch.
template <typename Call, typename Fn>
void CpuBackend::RunTeam(int threads, Call* call, const Fn& run) const {
  const std::size_t team_bytes = Team::Bytes(threads);
  std::byte* scratch = cpu::Scratch::Take(team_bytes + call->ScratchBytes());
  call->UseScratch(scratch + team_bytes);
  Team(threads, spins_, scratch).Run(run);
}

void CpuBackend::Rank(const RankArgs& a) const {
  const int threads = Threads(static_cast<std::int64_t>(a.heads.size()) * 2);
  cpu::Ranker ranker(*kernels_, a, threads);
  RunTeam(threads, &ranker, [&](const Member& m) { ranker.Run(m); });
  if (ranker.failure()) std::rethrow_exception(ranker.failure());
}

void CpuBackend::Attend(const AttendArgs& a) const {
  cpu::AttendCall call(*kernels_, a);
  RunTeam(Threads(call.MostChunks()), &call, [&](const Member& m) { RunAttend(call, m); });
}

// Few blocks are left to the calling thread: a parallel region costs more.
void CpuBackend::Weigh(const WeighArgs& a) const {
  constexpr std::int64_t kFewTasks = 4;
  cpu::WeighCall call(*kernels_, a, a.n_blocks);
  const int threads = call.n_tasks() > kFewTasks ? Threads(call.n_tasks()) : 1;
  RunTeam(threads, &call, [&](const Member& m) {
    m.ForMine(call.n_tasks(),
              [&](std::int64_t i) { call.Run(i, a.heads[Size(call.head_of(i))].least); });
    m.Wait();
    m.ForMine(call.n_query_heads(), [&](std::int64_t i) { call.Join(i); });
  });
}

void CpuBackend::RankAttend(const RankAttendArgs& a) const {
  const int threads = Threads(static_cast<std::int64_t>(a.rank.heads.size()) * 2);
  RankAttendCall call(*kernels_, a, threads);
  RunTeam(threads, &call, [&](const Member& m) { call.Run(m); });
  if (call.failure()) std::rethrow_exception(call.failure());
}

}  // namespace fathom
