// SPDX-License-Identifier: MIT
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "fathom/error.h"
#include "memory/aligned_buffer.h"
#include "memory/reservation.h"
#include "memory/system_memory.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

using test::TempDir;

constexpr std::int64_t kMiB = 1 << 20;

// The message of the kNoMemory error that `fn` throws; empty when it throws none.
template <typename Fn>
std::string NoMemoryMessage(Fn fn) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNoMemory);
    return error.what();
  }
  return {};
}

TEST(AlignedBuffer, IsAlignedZeroedAndExactInSize) {
  for (const std::size_t bytes : {1u, 63u, 64u, 65u, 4096u, 1000003u}) {
    AlignedBuffer buffer(bytes);
    EXPECT_EQ(buffer.size(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0u);
    EXPECT_TRUE(std::all_of(buffer.data(), buffer.data() + bytes,
                            [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(AlignedBuffer, EmptyHoldsNothing) {
  EXPECT_EQ(AlignedBuffer().data(), nullptr);
  EXPECT_EQ(AlignedBuffer(0).size(), 0u);
}

TEST(AlignedBuffer, MovingKeepsTheAddress) {
  AlignedBuffer a(100);
  *a.as<std::uint32_t>(8) = 7;
  const std::byte* const address = a.data();
  AlignedBuffer b(std::move(a));
  EXPECT_EQ(b.data(), address);
  AlignedBuffer c(10);
  c = std::move(b);
  EXPECT_EQ(c.data(), address);
  EXPECT_EQ(c.size(), 100u);
  EXPECT_EQ(*std::as_const(c).as<std::uint32_t>(8), 7u);
  EXPECT_EQ(b.data(), nullptr);  // NOLINT: moved-from is empty by contract
  EXPECT_EQ(b.size(), 0u);
}

TEST(AlignedBuffer, NamesTheSizeItCannotHave) {
  for (const std::size_t bytes : {std::size_t{1} << 60, SIZE_MAX}) {
    EXPECT_NE(NoMemoryMessage([&] { AlignedBuffer b(bytes); }).find(std::to_string(bytes)),
              std::string::npos);
  }
}

TEST(Reservation, IsZeroedAndTakesMemoryOnlyWhereWritten) {
  constexpr std::size_t kBytes = std::size_t{64} << 30;  // more than small machines have
  for (const bool huge_pages : {false, true}) {
    Reservation r(kBytes, huge_pages);
    EXPECT_EQ(r.size(), kBytes);
    for (std::size_t at = 0; at < kBytes; at += std::size_t{8} << 30) {
      EXPECT_EQ(r.data()[at], std::byte{0});
      r.data()[at] = std::byte{1};
    }
    r.data()[kBytes - 1] = std::byte{2};
  }
}

TEST(Reservation, MovingKeepsTheAddress) {
  Reservation a(4096, false);
  a.data()[5] = std::byte{9};
  const std::byte* const address = a.data();
  Reservation b(std::move(a));
  Reservation c(8192, false);
  c = std::move(b);
  EXPECT_EQ(c.data(), address);
  EXPECT_EQ(c.size(), 4096u);
  EXPECT_EQ(c.data()[5], std::byte{9});
  EXPECT_EQ(b.data(), nullptr);  // NOLINT: moved-from is empty by contract
  EXPECT_EQ(Reservation(0, true).data(), nullptr);
}

TEST(Reservation, NamesTheSizeItCannotHave) {
  constexpr std::size_t kBytes = std::size_t{1} << 62;
  EXPECT_NE(NoMemoryMessage([] { Reservation r(kBytes, false); }).find(std::to_string(kBytes)),
            std::string::npos);
}

TEST(SystemMemory, ThisMachineHasSome) {
  EXPECT_GT(TotalMemoryBytes(), 0);
  EXPECT_GT(AvailableMemoryBytes(), 0);
  EXPECT_LE(AvailableMemoryBytes(), TotalMemoryBytes());
}

TEST(SystemMemory, ComesFromMeminfoWithoutLimits) {
  const TempDir root;
  EXPECT_EQ(internal::AvailableMemoryBytes(root.string()), 0) << "unknown";
  root.Write("proc/meminfo", "MemTotal:  1024 kB\nMemFree: 1 kB\nMemAvailable:  512 kB\n");
  EXPECT_EQ(internal::TotalMemoryBytes(root.string()), kMiB);
  EXPECT_EQ(internal::AvailableMemoryBytes(root.string()), kMiB / 2);
}

TEST(SystemMemory, HonoursControlGroupsVersion2) {
  const TempDir root;
  root.Write("proc/meminfo", "MemTotal: 10240 kB\nMemAvailable: 8192 kB\n");
  root.Write("proc/self/cgroup", "0::/user/job\n");
  root.Write("sys/fs/cgroup/user/job/memory.max", "max\n");
  EXPECT_EQ(internal::AvailableMemoryBytes(root.string()), 8 * kMiB);
  // An ancestor's limit of 4 MiB, of which 3 are used, 2 of them files that can be dropped.
  root.Write("sys/fs/cgroup/user/memory.max", std::to_string(4 * kMiB) + "\n");
  root.Write("sys/fs/cgroup/user/memory.current", std::to_string(3 * kMiB) + "\n");
  root.Write("sys/fs/cgroup/user/memory.stat",
             "anon 1\ninactive_file " + std::to_string(2 * kMiB) + "\nactive_file 5\n");
  EXPECT_EQ(internal::AvailableMemoryBytes(root.string()), 3 * kMiB);
  EXPECT_EQ(internal::TotalMemoryBytes(root.string()), 4 * kMiB);
  // Used up, and beyond.
  root.Write("sys/fs/cgroup/user/memory.current", std::to_string(9 * kMiB) + "\n");
  EXPECT_EQ(internal::AvailableMemoryBytes(root.string()), 0);
  // A limit above what the machine has changes nothing.
  root.Write("sys/fs/cgroup/user/memory.max", std::to_string(100 * kMiB) + "\n");
  EXPECT_EQ(internal::AvailableMemoryBytes(root.string()), 8 * kMiB);
  EXPECT_EQ(internal::TotalMemoryBytes(root.string()), 10 * kMiB);
}

TEST(SystemMemory, HonoursControlGroupsVersion1) {
  const TempDir root;
  root.Write("proc/meminfo", "MemTotal: 10240 kB\nMemAvailable: 8192 kB\n");
  root.Write("proc/self/cgroup", "4:memory:/docker/abc\n0::/\n");
  // Inside a container the group's own folder is the mount point.
  root.Write("sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(5 * kMiB));
  root.Write("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(kMiB));
  root.Write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0\n");
  EXPECT_EQ(internal::AvailableMemoryBytes(root.string()), 4 * kMiB);
  EXPECT_EQ(internal::TotalMemoryBytes(root.string()), 5 * kMiB);
  // "No limit" of version 1 is a huge number.
  root.Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(internal::AvailableMemoryBytes(root.string()), 8 * kMiB);
}

}  // namespace
}  // namespace fathom
