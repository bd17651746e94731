// SPDX-License-Identifier: MIT
// The prefill kernel of cpu/amx over an emulation of the tiles, so that every machine checks its
// algorithm and its error: what it packs where, and what the split into bf16 costs. On a machine
// with AMX the conformance test checks the kernel itself.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "support/prefill_cases.h"

#define FATHOM_INLINE inline __attribute__((always_inline))

namespace fathom::cpu {
namespace {

const KernelTable* PlainKernels() { return PortableKernels(); }

#include "backend/cpu/simd_portable.h"

#include "support/tile_emulation.h"

#include "backend/cpu/prefill_amx_impl.h"

}  // namespace
}  // namespace fathom::cpu

namespace fathom::test {
namespace {

class EmulatedPrefillTile : public testing::Test {
 protected:
  static PrefillChecks checks() {
    return PrefillChecks([](int threads) {
      static const cpu::KernelTable kTable = [] {
        cpu::KernelTable table = *cpu::PortableKernels();
        table.isa = "portable";
        table.prefill_scratch = cpu::PrefillScratch;
        table.prefill_tile = cpu::PrefillTile;
        return table;
      }();
      return std::make_unique<CpuBackend>(&kTable, threads);
    });
  }
};

FATHOM_PREFILL_TESTS(TEST_F, EmulatedPrefillTile, checks());

// The error of all six products, and without each of them: the figures of
// docs/kernels/prefill-cpu.md are properties of this test (--gtest_output=xml:FILE).
TEST_F(EmulatedPrefillTile, EveryProductIsNeeded) {
  struct Data {
    const char* name;
    PrefillCase prefill;
  };
  for (const Data& data : {Data{"normal", {{2, 1, 128}, 1000, 32}},
                           Data{"heavy_tailed", {{2, 1, 128}, 1000, 32, DataKind::kHeavyTailed}},
                           Data{"bias_50", {{2, 1, 128}, 1000, 32, DataKind::kNormal, 1, 50}},
                           Data{"bias_500", {{2, 1, 128}, 1000, 32, DataKind::kNormal, 1, 500}}}) {
    const auto error = [&](int left_out) {
      cpu::left_out = left_out;
      const double e = checks().Error(data.prefill);
      cpu::left_out = 0;
      RecordProperty(std::string(data.name) + "_without_" + std::to_string(left_out),
                     std::to_string(e * 1e6) + "e-6");
      return e;
    };
    const double all = error(0);
    for (const int product : {0, 2, 3, 5}) EXPECT_GT(error(1 << product), 5 * all) << data.name;
    EXPECT_GT(error(0b101'101), 100 * all) << data.name << ", bf16 alone";
  }
}

// The kernel writes its results and its scratch, no float beyond.
TEST_F(EmulatedPrefillTile, StaysInItsScratch) {
  constexpr float kUntouched = 12345.0f;
  constexpr std::size_t kFence = 64;
  for (const auto& [positions, group, dim] :
       {std::tuple{1, 1, 16}, {3, 5, 48}, {16, 16, 80}, {40, 6, 64}, {64, 4, 128}, {9, 7, 256}}) {
    const std::int64_t first = 100;
    const auto rows = RandomRows(DataKind::kNormal, first + positions, dim, 1);
    const auto q = RandomNormal(positions * group * dim, 2);
    std::vector<float> out(q.size() + kFence, kUntouched);
    const auto size = static_cast<std::size_t>(cpu::PrefillScratch(positions * group, dim));
    std::vector<float> scratch(size + kFence, kUntouched);
    const cpu::PrefillTileArgs args = {rows.data(), q.data(),      out.data(), group * dim,
                                       first,       positions,     dim,        group,
                                       0.1f,        scratch.data()};
    cpu::PrefillTile(&args);
    for (std::size_t i = 0; i < kFence; ++i) {
      EXPECT_EQ(scratch[size + i], kUntouched) << positions << ' ' << group << ' ' << dim;
      EXPECT_EQ(out[q.size() + i], kUntouched) << positions << ' ' << group << ' ' << dim;
    }
  }
}

}  // namespace
}  // namespace fathom::test
