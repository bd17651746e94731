// SPDX-License-Identifier: MIT
// The threads of one parallel region, with a barrier for phases of a few microseconds.
//
// The OpenMP runtime counts arrivals in one place and calls the kernel at every barrier, which
// takes 1.6 us with 16 threads; here every thread raises a flag of its own, thread 0 looks at all
// of them and lets everyone go: .7 us. Threads spin for a while and then sleep. Teams that have not
// a processor for each thread wait as the runtime does.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "backend/cpu/scratch.h"

namespace fathom::cpu {

class Team {
 public:
  // One thread of the team.
  class Member {
   public:
    int thread() const { return thread_; }
    int size() const { return size_; }
    // Returns when all members have called it; all that they wrote before is visible then. The
    // members call it equally often.
    void Wait() const { team_->Wait(thread_, size_); }
    // This member's part of 0 .. n - 1, neighbours together: Begin(n) .. End(n) - 1.
    std::int64_t Begin(std::int64_t n) const { return n * thread_ / size_; }
    std::int64_t End(std::int64_t n) const { return n * (thread_ + 1) / size_; }
    // fn(i) for each of them.
    template <typename Fn>
    void ForMine(std::int64_t n, const Fn& fn) const {
      for (std::int64_t i = Begin(n); i < End(n); ++i) fn(i);
    }

   private:
    friend class Team;
    Member(Team* team, int thread, int size) : team_(team), thread_(thread), size_(size) {}
    Team* team_;
    int thread_;
    int size_;
  };

  // Scratch of a team of that many threads.
  static std::size_t Bytes(int threads) {
    return LineBytes<std::byte>(sizeof(Line) * static_cast<std::size_t>(threads + 1));
  }
  // scratch: Bytes(threads), at a cache line. spins: whether every thread has a processor.
  Team(int threads, bool spins, std::byte* scratch)
      : threads_(threads), spins_(spins), lines_(reinterpret_cast<Line*>(scratch)) {
    for (int i = 0; i <= threads; ++i) new (lines_ + i) Line{};
  }

  // fn(member) on all threads: `threads` of them, or fewer where the runtime has no more to give,
  // in a caller's own parallel region for one. Once for each Team. fn must not throw.
  template <typename Fn>
  void Run(const Fn& fn) {
#pragma omp parallel num_threads(threads_) if (threads_ > 1)
    fn(Member(this, omp_get_thread_num(), omp_get_num_threads()));
  }

 private:
  struct alignas(kCacheLine) Line {
    std::atomic<std::uint32_t> round{0};
  };
  // 10 to 60 us, by what a pause is: more than a phase lasts longer on one thread than on another,
  // unless others use its processor. They shall have this one then, too.
  static constexpr int kSpins = 1000;

  // round goes to `value` and not beyond.
  static void Until(const std::atomic<std::uint32_t>& round, std::uint32_t value) {
    for (int i = 0; i < kSpins; ++i) {
      if (round.load(std::memory_order_acquire) == value) return;
      Pause();
    }
    std::uint32_t seen;
    while ((seen = round.load(std::memory_order_acquire)) != value) {
      round.wait(seen, std::memory_order_acquire);
    }
  }
  static void Pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }

  void Wait(int thread, int size) {
    if (size == 1) return;
    if (!spins_) {
#pragma omp barrier
      return;
    }
    Line& go = lines_[threads_];
    Line& mine = lines_[thread];
    // Only this thread writes its line, thread 0 that of all.
    // Stores are sequentially consistent so that whether anyone sleeps is asked after them.
    const std::uint32_t round = mine.round.load(std::memory_order_relaxed) + 1;
    mine.round.store(round);
    if (thread != 0) {
      mine.round.notify_one();
      Until(go.round, round);
      return;
    }
    for (int i = 1; i < size; ++i) Until(lines_[i].round, round);
    go.round.store(round);
    go.round.notify_all();
  }

  const int threads_;
  const bool spins_;
  Line* const lines_;  // [threads + 1] rounds that each thread has reached, and that all have
};

}  // namespace fathom::cpu
