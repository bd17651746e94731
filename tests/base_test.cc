// SPDX-License-Identifier: MIT
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/cgroup.h"
#include "base/cpu_features.h"
#include "base/half.h"
#include "base/timer.h"
#include "support/random_data.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

using test::Random;
using test::TempDir;

std::uint32_t Bits(float f) { return std::bit_cast<std::uint32_t>(f); }
float FromBits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// The value of a half by its definition.
double HalfValue(std::uint32_t h) {
  const int exponent = static_cast<int>((h >> 10) & 31);
  const double fraction = (h & 0x3FF) / 1024.0;
  const double sign = (h & 0x8000) != 0 ? -1.0 : 1.0;
  return sign *
         (exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15));
}

bool IsNan(std::uint32_t h) { return (h & 0x7FFF) > 0x7C00; }

TEST(Half, WidensEveryValueExactly) {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const float f = HalfToFloat(static_cast<Half>(h));
    if (IsNan(h)) {
      EXPECT_TRUE(std::isnan(f)) << h;
    } else if ((h & 0x7FFF) == 0x7C00) {
      EXPECT_TRUE(std::isinf(f) && std::signbit(f) == (h > 0x7FFF)) << h;
    } else {
      EXPECT_EQ(static_cast<double>(f), HalfValue(h)) << h;
      EXPECT_EQ(std::signbit(f), h > 0x7FFF) << h;
    }
  }
}

TEST(Half, RoundTripsEveryValue) {
  constexpr std::uint32_t kQuiet = 0x0200;
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const std::uint32_t expected = IsNan(h) ? h | kQuiet : h;
    EXPECT_EQ(FloatToHalf(HalfToFloat(static_cast<Half>(h))), expected) << h;
  }
}

TEST(Half, RoundsHalfwayToEvenBetweenAllNeighbours) {
  for (std::uint32_t h = 0; h < 0x7BFF; ++h) {
    const auto middle = static_cast<float>((HalfValue(h) + HalfValue(h + 1)) / 2);  // exact
    const std::uint32_t even = (h & 1) == 0 ? h : h + 1;
    EXPECT_EQ(FloatToHalf(middle), even) << h;
    EXPECT_EQ(FloatToHalf(-middle), even | 0x8000) << h;
    EXPECT_EQ(FloatToHalf(std::nextafter(middle, 0.0f)), h) << h;
    EXPECT_EQ(FloatToHalf(std::nextafter(middle, 1e9f)), h + 1) << h;
  }
}

TEST(Half, OverflowsToInfAndUnderflowsToZero) {
  EXPECT_EQ(FloatToHalf(std::nextafter(65520.0f, 0.0f)), 0x7BFF);
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7C00);
  EXPECT_EQ(FloatToHalf(-std::numeric_limits<float>::max()), 0xFC00);
  EXPECT_EQ(FloatToHalf(std::numeric_limits<float>::infinity()), 0x7C00);
  EXPECT_EQ(FloatToHalf(0x1p-25f), 0);  // half of the smallest subnormal: to even
  EXPECT_EQ(FloatToHalf(std::nextafter(0x1p-25f, 1.0f)), 1);
  EXPECT_EQ(FloatToHalf(-std::numeric_limits<float>::denorm_min()), 0x8000);
}

// The array forms use F16C here, so this compares the scalar code with the processor.
TEST(Half, EqualsF16c) {
  if (!GetCpuFeatures().f16c) GTEST_SKIP() << "this processor has no F16C";
  std::vector<Half> halves(65536);
  for (std::uint32_t h = 0; h < 65536; ++h) halves[h] = static_cast<Half>(h);
  std::vector<float> floats(halves.size());
  ConvertHalfToFloat(halves.data(), static_cast<std::int64_t>(halves.size()), floats.data());
  for (std::uint32_t h = 0; h < 65536; ++h) {
    ASSERT_EQ(Bits(floats[h]), Bits(HalfToFloat(static_cast<Half>(h)))) << h;
  }

  floats.clear();
  constexpr std::uint32_t kStep = 4093;  // a prime: low bits vary too
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += kStep) {
    floats.push_back(FromBits(static_cast<std::uint32_t>(bits)));
  }
  floats.resize(floats.size() / 8 * 8);
  halves.resize(floats.size());
  ConvertFloatToHalf(floats.data(), static_cast<std::int64_t>(floats.size()), halves.data());
  for (std::size_t i = 0; i < floats.size(); ++i) {
    ASSERT_EQ(halves[i], FloatToHalf(floats[i])) << std::hex << Bits(floats[i]);
  }
}

TEST(Half, ArraysOfAnyLengthAndAlignmentEqualScalars) {
  const std::vector<float> x = test::RandomNormal(64, 1, 100.0);
  for (std::int64_t n = 0; n < 40; ++n) {
    for (std::int64_t start = 0; start < 3; ++start) {
      std::vector<Half> half(
          static_cast<std::size_t>(n));  // exact size: a sanitizer sees an overrun
      ConvertFloatToHalf(x.data() + start, n, half.data());
      std::vector<float> back(half.size());
      ConvertHalfToFloat(half.data(), n, back.data());
      for (std::size_t i = 0; i < half.size(); ++i) {
        ASSERT_EQ(half[i], FloatToHalf(x[i + static_cast<std::size_t>(start)]));
        ASSERT_EQ(back[i], HalfToFloat(half[i]));
      }
    }
  }
}

TEST(CpuFeatures, AreConsistent) {
  const CpuFeatures& f = GetCpuFeatures();
  EXPECT_EQ(&f, &GetCpuFeatures());
  if (f.avx512bw || f.avx512dq || f.avx512vl || f.avx512vbmi || f.avx512vbmi2 || f.avx512vnni ||
      f.avx512bf16) {
    EXPECT_TRUE(f.avx512f);
  }
  if (f.avx512f) {
    EXPECT_TRUE(f.avx2);
  }
  if (f.amx_bf16 || f.amx_int8 || AllowAmxTiles()) {
    EXPECT_TRUE(f.amx_tile);
  }
  EXPECT_EQ(AllowAmxTiles(), AllowAmxTiles());
}

TEST(UsableProcessors, IsAtLeastOne) { EXPECT_GE(UsableProcessors(), 1); }

TEST(CgroupCpuQuota, TakesTheSmallestOfTheGroupAndItsAncestors) {
  const TempDir root;
  EXPECT_EQ(internal::CgroupCpuQuota(root.string()), 0) << "no files";
  root.Write("proc/self/cgroup", "0::/a/b\n");
  root.Write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(internal::CgroupCpuQuota(root.string()), 0) << "no limit";
  root.Write("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  EXPECT_EQ(internal::CgroupCpuQuota(root.string()), 1.5);
  root.Write("sys/fs/cgroup/a/b/cpu.max", "400000 100000\n");
  EXPECT_EQ(internal::CgroupCpuQuota(root.string()), 1.5);
}

TEST(CgroupCpuQuota, ReadsTheMountPointInAContainer) {
  const TempDir root;
  root.Write("proc/self/cgroup", "5:cpu,cpuacct:/docker/0123\n3:memory:/docker/0123\n");
  root.Write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  root.Write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(internal::CgroupCpuQuota(root.string()), 0);
  root.Write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n");
  EXPECT_EQ(internal::CgroupCpuQuota(root.string()), 2.5);
}

TEST(CgroupCpuQuota, IgnoresDamagedFiles) {
  const TempDir root;
  root.Write("proc/self/cgroup", "nonsense\n0::/a\n:\n");
  for (const char* text :
       {"", "\n", "100000", "x y", "100000 0", "-5 100000", "99999999999999999999 1"}) {
    root.Write("sys/fs/cgroup/a/cpu.max", text);
    EXPECT_EQ(internal::CgroupCpuQuota(root.string()), 0) << text;
  }
}

TEST(Timer, DoesNotGoBack) {
  double last = NowSeconds();
  for (int i = 0; i < 1000; ++i) {
    const double now = NowSeconds();
    ASSERT_GE(now, last);
    last = now;
  }
}

}  // namespace
}  // namespace fathom
