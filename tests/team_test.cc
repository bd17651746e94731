// SPDX-License-Identifier: MIT
// The barrier of the CPU backend's teams: nobody goes on before everyone has come, however late.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "backend/cpu/team.h"

namespace fathom::cpu {
namespace {

class TeamTest : public testing::TestWithParam<bool> {
 protected:
  // Runs rounds in which one member after the other is late by `delay`; returns how often a member
  // went on while another had not come.
  static int EarlyOnes(int threads, std::chrono::microseconds delay, bool spins) {
    constexpr int kRounds = 60;
    std::array<std::atomic<int>, kRounds> came{};
    std::atomic<int> early = 0;
    Team(threads, spins, Scratch::Take(Team::Bytes(threads))).Run([&](const Team::Member& m) {
      for (int round = 0; round < kRounds; ++round) {
        if (round % m.size() == m.thread()) std::this_thread::sleep_for(delay);
        ++came[static_cast<std::size_t>(round)];
        m.Wait();
        if (came[static_cast<std::size_t>(round)] != m.size()) ++early;
      }
    });
    return early;
  }
};

// More threads than processors spin as well here, and sleep.
TEST_P(TeamTest, NobodyGoesOnEarly) {
  for (const int threads : {1, 2, 3, 8}) {
    for (const int delay_us : {0, 5, 2000}) {
      EXPECT_EQ(EarlyOnes(threads, std::chrono::microseconds(delay_us), GetParam()), 0)
          << threads << " threads, " << delay_us << " us";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, TeamTest, testing::Bool(),
                         [](const auto& test) { return test.param ? "spinning" : "runtime"; });

}  // namespace
}  // namespace fathom::cpu
