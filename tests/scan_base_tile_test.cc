// SPDX-License-Identifier: MIT
// The bases of cpu/amx over an emulation of the tiles, so that every machine checks which digit and
// which code meet where. On a machine with AMX the conformance test checks the kernel itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "backend/cpu/kernels.h"
#include "memory/aligned_buffer.h"
#include "store/layout.h"
#include "support/random_data.h"

#define FATHOM_INLINE inline __attribute__((always_inline))

namespace fathom::cpu {
namespace {

#include "backend/cpu/simd_portable.h"

#include "support/base_codes_portable.h"
#include "support/tile_emulation.h"

#include "backend/cpu/scan_base_plan_impl.h"

#include "backend/cpu/scan_base_amx_impl.h"

}  // namespace
}  // namespace fathom::cpu

namespace fathom::test {
namespace {

// Sums of |weight| stay below 2^23, what every channel of 256 may have.
enum class Weights {
  kSmall,        // two digits are enough
  kEdges,        // around the ends of one digit and of two, in one head of each channel
  kFewLarge,     // in a few channels, the same for all heads
  kOneNegative,  // nearly all that may be, below 0
  kSpread,       // every channel is large for some head
};
constexpr Weights kAllWeights[] = {Weights::kSmall, Weights::kEdges, Weights::kFewLarge,
                                   Weights::kOneNegative, Weights::kSpread};

std::int32_t MakeWeight(Weights kind, int c, int head, int group, Random* random) {
  constexpr std::int32_t kEdges[] = {32639, 32640, -32896, -32897, 127, 128, -128, -129, 0};
  const auto small = static_cast<std::int32_t>(random->Integer(-9000, 9000));
  const auto large = static_cast<std::int32_t>(random->Integer(33000, 400000));
  switch (kind) {
    case Weights::kSmall:
      return small;
    case Weights::kEdges:
      return c % group == head ? kEdges[c % 9] : small / 100;
    case Weights::kFewLarge:
      return c % 29 != 3 ? small : head % 2 == 0 ? large : -large;
    case Weights::kOneNegative:
      return c == 7 ? -(1 << 21) : -(small & 1023);
    case Weights::kSpread:
      return c % group != head ? small / 100 : c % 2 == 0 ? 32700 : -32950;
  }
  return 0;
}

struct BaseCase {
  int head_dim;
  int group;
  int mean_bits;
  Weights weights;
  int segment_blocks = 64;
  int n_active = -1;  // all
};

class EmulatedBaseTile : public testing::Test {
 protected:
  static constexpr std::int32_t kUntouched = 0x5A5A5A5A;
  static constexpr std::size_t kFence = 64;

  // A plan of exactly the bytes that it asks for, and a segment of exactly its size.
  void Start(const BaseCase& c) {
    c_ = c;
    const int n_active = c.n_active < 0 ? c.head_dim : c.n_active;
    Random random(static_cast<std::uint64_t>(c.head_dim * 1000 + c.group));
    channel_.clear();
    for (int j = 0; j < c.head_dim && static_cast<int>(channel_.size()) < n_active; ++j) {
      const auto left = static_cast<std::int64_t>(c.head_dim - j);
      const auto wanted = n_active - static_cast<std::int64_t>(channel_.size());
      if (random.Integer(1, left) <= wanted) channel_.push_back(j);
    }
    weight_.clear();
    for (int i = 0; i < n_active; ++i) {
      for (int h = 0; h < c.group; ++h) {
        weight_.push_back(MakeWeight(c.weights, i, h, c.group, &random));
      }
    }
    constant_.clear();
    for (int h = 0; h < c.group; ++h) {
      constant_.push_back(static_cast<std::int32_t>(random.Integer(-(1 << 24), 1 << 24)));
    }
    side_.resize(layout::SideBytes(Codec::kMean, c.head_dim, c.mean_bits, c.segment_blocks));
    for (auto& byte : side_) byte = static_cast<std::uint8_t>(random.Bits());
    MakePlan(n_active);
  }

  // Bases of all heads, `stride` apart; what is not written stays kUntouched.
  std::vector<std::int32_t> Run(int first, int count, std::int64_t stride) const {
    std::vector<std::int32_t> base(static_cast<std::size_t>(c_.group * stride), kUntouched);
    const cpu::ScanBaseArgs args = {
        plan_.data(),    side_.data(),   c_.segment_blocks, c_.mean_bits,
        first,           count,          c_.group,          n_active(),
        channel_.data(), weight_.data(), constant_.data(),  base.data(),
        stride};
    cpu::TileBase(&args);
    return base;
  }

  std::vector<std::int32_t> Expected(int first, int count, std::int64_t stride) const {
    std::vector<std::int32_t> base(static_cast<std::size_t>(c_.group * stride), kUntouched);
    for (int h = 0; h < c_.group; ++h) {
      for (int b = 0; b < count; ++b) {
        std::int64_t sum = constant_[static_cast<std::size_t>(h)];
        for (int i = 0; i < n_active(); ++i) {
          const std::int64_t w = weight_[static_cast<std::size_t>(i * c_.group + h)];
          sum += w * Code(channel_[static_cast<std::size_t>(i)], first + b);
        }
        base[static_cast<std::size_t>(h * stride + b)] = static_cast<std::int32_t>(sum);
      }
    }
    return base;
  }

  void Check(int first, int count) const {
    const std::int64_t stride = count + 3;
    ASSERT_EQ(Run(first, count, stride), Expected(first, count, stride))
        << "dim " << c_.head_dim << " group " << c_.group << " bits " << c_.mean_bits << " weights "
        << static_cast<int>(c_.weights) << " blocks " << first << " + " << count << " of "
        << c_.segment_blocks;
  }

  const cpu::BaseTilePlan& plan() const {
    return *reinterpret_cast<const cpu::BaseTilePlan*>(plan_.data());
  }

 private:
  int n_active() const { return static_cast<int>(channel_.size()); }

  int Code(int channel, int block) const {
    if (c_.mean_bits == 8) {
      return static_cast<std::int8_t>(
          side_[static_cast<std::size_t>(channel * c_.segment_blocks + block)]);
    }
    const auto at = static_cast<std::size_t>(channel * (c_.segment_blocks / 2) + block / 2);
    return layout::UnpackNibble(side_[at], block);
  }

  void MakePlan(int n_active) {
    const auto bytes = static_cast<std::size_t>(cpu::TileBasePlanBytes(n_active, c_.group));
    plan_ = AlignedBuffer(bytes + kFence);
    std::memset(plan_.data(), 0x5A, bytes + kFence);
    const cpu::ScanBasePlanArgs args = {c_.segment_blocks, c_.mean_bits,    c_.group,
                                        n_active,          channel_.data(), weight_.data(),
                                        constant_.data(),  plan_.data()};
    cpu::MakeTileBasePlan(&args);
    for (std::size_t i = 0; i < kFence; ++i) {
      ASSERT_EQ(plan_.data()[bytes + i], std::byte{0x5A}) << "the plan ends before " << i;
    }
  }

  BaseCase c_{};
  std::vector<std::int32_t> channel_;
  std::vector<std::int32_t> weight_;
  std::vector<std::int32_t> constant_;
  std::vector<std::uint8_t> side_;
  AlignedBuffer plan_;
};

TEST_F(EmulatedBaseTile, EqualsAPlainSum) {
  for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}) {
    for (const int dim : {64, 80, 128, 256}) {
      for (const int bits : {4, 8}) {
        for (const Weights weights : kAllWeights) {
          Start({dim, group, bits, weights});
          for (const int count : {0, 1, 63, 64}) Check(0, count);
        }
      }
    }
  }
}

// As the drivers cut segments: 64 blocks at a time, or from any even block on.
TEST_F(EmulatedBaseTile, PartsOfSegments) {
  for (const int bits : {4, 8}) {
    for (const int blocks : {2, 18, 66, 130}) {
      Start({80, 4, bits, Weights::kFewLarge, blocks});
      for (int first = 0; first < blocks; first += 64) Check(first, std::min(blocks - first, 64));
      for (int first = 0; first < blocks; first += 14) Check(first, std::min(blocks - first, 33));
    }
  }
}

TEST_F(EmulatedBaseTile, SomeChannels) {
  for (const int n : {0, 1, 3, 4, 5, 63, 64, 65, 127}) {
    for (const Weights weights : kAllWeights) {
      Start({128, 6, 4, weights, 64, n});
      Check(0, 64);
    }
  }
}

// What makes the sets of rows as few, and as short, as weights allow.
TEST_F(EmulatedBaseTile, TakesNoMoreTilesThanItNeeds) {
  const auto steps = [&](int group, Weights weights) {
    Start({128, group, 4, weights});
    return std::vector<int>(plan().steps, plan().steps + plan().n_sets);
  };
  using Steps = std::vector<int>;
  EXPECT_EQ(steps(4, Weights::kSmall), Steps({2}));
  EXPECT_EQ(steps(5, Weights::kSpread), Steps({2}));
  EXPECT_EQ(steps(6, Weights::kSmall), Steps({2}));
  EXPECT_EQ(steps(6, Weights::kFewLarge), Steps({2, 1}));
  EXPECT_EQ(steps(8, Weights::kSmall), Steps({2}));
  EXPECT_EQ(steps(8, Weights::kOneNegative), Steps({2, 1}));
  EXPECT_EQ(steps(8, Weights::kSpread), Steps({2, 2}));
  EXPECT_EQ(steps(12, Weights::kFewLarge), Steps({2, 2, 1}));
  EXPECT_EQ(steps(16, Weights::kSmall), Steps({2, 2}));
  EXPECT_EQ(steps(16, Weights::kFewLarge), Steps({2, 2, 1}));
}

}  // namespace
}  // namespace fathom::test
