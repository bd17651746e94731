// SPDX-License-Identifier: MIT
// Host memory for CUDA: what needs no device is tested with a stand-in for registering.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/buffer.h"
#include "backend/cuda/host_arena.h"
#include "backend/cuda/host_pins.h"
#include "fathom/error.h"
#include "memory/system_memory.h"
#include "support/error_of.h"

namespace fathom::cuda {
namespace {

using test::ErrorOf;

constexpr std::int64_t kPage = HostArena::kPage;

// Registers as told and remembers what is registered.
struct FakePinner {
  std::mutex mutex;
  std::map<std::byte*, std::size_t> held;
  int n_pins = 0;
  int n_unpins = 0;
  int refuse_at = -1;  // the call of pin that refuses
  std::string begin_failure;
  std::atomic<bool> wait{false};  // pin blocks meanwhile

  HostPinner Pinner() {
    HostPinner pinner;
    pinner.begin = [this] { return begin_failure; };
    pinner.pin = [this](std::byte* at, std::size_t bytes) -> std::string {
      while (wait) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const std::lock_guard lock(mutex);
      if (n_pins++ == refuse_at) return "refused";
      held[at] = bytes;
      return {};
    };
    pinner.unpin = [this](std::byte* at) {
      const std::lock_guard lock(mutex);
      n_unpins += static_cast<int>(held.erase(at));
    };
    return pinner;
  }
};

bool Holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(HostArena, RegistersAllInPieces) {
  FakePinner fake;
  {
    HostArena arena(11 * kPage - 100, fake.Pinner(), 4 * kPage);
    EXPECT_EQ(arena.size(), 11 * kPage);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena.data()) % kPage, 0U);
    arena.Wait();
    EXPECT_TRUE(arena.done());
    EXPECT_TRUE(arena.pinned());
    EXPECT_EQ(arena.reason(), "");
    EXPECT_EQ(arena.registered_bytes(), arena.size());
    EXPECT_EQ(arena.device_data(), arena.data());
    ASSERT_EQ(fake.held.size(), 3U);
    std::byte* at = arena.data();
    for (const std::int64_t pages : {4, 4, 3}) {
      ASSERT_EQ(fake.held.count(at), 1U);
      EXPECT_EQ(fake.held[at], static_cast<std::size_t>(pages * kPage));
      at += pages * kPage;
    }
    EXPECT_TRUE(std::all_of(arena.data(), arena.data() + arena.size(),
                            [](std::byte b) { return b == std::byte{0}; }));
    arena.Wait();  // again is nothing new
  }
  EXPECT_TRUE(fake.held.empty());
  EXPECT_EQ(fake.n_unpins, 3);
}

TEST(HostArena, KeepsWhatIsWrittenMeanwhile) {
  FakePinner fake;
  HostArena arena(64 * kPage, fake.Pinner(), 2 * kPage);
  for (std::int64_t i = arena.size() - 4096; i >= 0; i -= 4096) arena.data()[i] = std::byte{7};
  arena.Wait();
  for (std::int64_t i = 0; i < arena.size(); i += 4096) {
    ASSERT_EQ(arena.data()[i], std::byte{7}) << i;
  }
}

TEST(HostArena, ARefusalUnregistersWhatThereWas) {
  FakePinner fake;
  fake.refuse_at = 2;
  HostArena arena(10 * kPage, fake.Pinner(), 2 * kPage);
  arena.Wait();
  EXPECT_TRUE(arena.done());
  EXPECT_FALSE(arena.pinned());
  EXPECT_TRUE(Holds(arena.reason(), "refused")) << arena.reason();
  EXPECT_TRUE(Holds(arena.reason(), "8.0 MiB of 20.0 MiB")) << arena.reason();
  EXPECT_EQ(arena.registered_bytes(), 0);
  EXPECT_EQ(arena.device_data(), nullptr);
  EXPECT_TRUE(fake.held.empty());
  EXPECT_EQ(fake.n_unpins, 2);
  arena.Allocate(arena.size())[arena.size() - 1] = std::byte{1};  // still memory
}

TEST(HostArena, ADeviceThatCannotBeUsedIsNoError) {
  FakePinner fake;
  fake.begin_failure = "no device";
  HostArena arena(kPage, fake.Pinner());
  arena.Wait();
  EXPECT_FALSE(arena.pinned());
  EXPECT_TRUE(Holds(arena.reason(), "no device"));
  EXPECT_EQ(fake.n_pins, 0);
}

TEST(HostArena, ReportsProgressAndStops) {
  FakePinner fake;
  fake.wait = true;
  HostArena arena(8 * kPage, fake.Pinner(), kPage);
  EXPECT_FALSE(arena.done());
  EXPECT_FALSE(arena.pinned());
  std::int64_t calls = 0;
  const std::string message = ErrorOf(ErrorCode::kCancelled, [&] {
    arena.Wait([&](std::int64_t registered, std::int64_t total) {
      EXPECT_GE(registered, 0);
      EXPECT_LE(registered, total);
      EXPECT_EQ(total, 8 * kPage);
      // The piece that is in work ends; the next does not begin.
      std::thread([&fake] {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        fake.wait = false;
      }).detach();
      return ++calls < 1;
    });
  });
  EXPECT_TRUE(Holds(message, "stopped"));
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(arena.pinned());
  EXPECT_LE(fake.n_pins, 1);
  EXPECT_TRUE(fake.held.empty());
}

TEST(HostArena, MayEndBeforeItIsRegistered) {
  FakePinner fake;
  { const HostArena arena(512 * kPage, fake.Pinner(), kPage); }
  EXPECT_TRUE(fake.held.empty());
}

TEST(HostArena, AllocatesAlignedUntilItIsFull) {
  FakePinner fake;
  HostArena arena(2 * kPage, fake.Pinner());
  EXPECT_EQ(arena.Allocate(1, 1), arena.data());
  EXPECT_EQ(arena.Allocate(10), arena.data() + 256);
  EXPECT_EQ(arena.Allocate(0, 64), arena.data() + 320);
  EXPECT_EQ(arena.Allocate(5, kPage), arena.data() + kPage);
  EXPECT_EQ(arena.used_bytes(), kPage + 5);
  const std::string message = ErrorOf(ErrorCode::kNoMemory, [&] { arena.Allocate(3 * kPage / 2); });
  EXPECT_TRUE(Holds(message, "3.0 MiB asked")) << message;
  EXPECT_TRUE(Holds(message, "of 4.0 MiB")) << message;
  ErrorOf(ErrorCode::kNoMemory, [&] { arena.Allocate(1, kPage); });
  EXPECT_EQ(arena.used_bytes(), kPage + 5);  // a refusal takes nothing
  arena.FreeAll();
  EXPECT_EQ(arena.Allocate(2 * kPage), arena.data());
  EXPECT_EQ(arena.Allocate(0, 1), arena.data() + 2 * kPage);
}

TEST(HostArena, EmptyHoldsNothing) {
  FakePinner fake;
  HostArena arena(0, fake.Pinner());
  arena.Wait();
  EXPECT_EQ(arena.data(), nullptr);
  EXPECT_EQ(arena.size(), 0);
  ErrorOf(ErrorCode::kNoMemory, [&] { arena.Allocate(1); });
  EXPECT_EQ(fake.n_pins, 0);
}

// Whole pages to register.
std::vector<std::byte> Pages(std::int64_t n) { return std::vector<std::byte>(n * 4096); }

TEST(HostPins, RegistersWhatIsAskedForAndNothingElse) {
  FakePinner fake;
  auto memory = Pages(8);
  {
    HostPins pins(fake.Pinner());
    EXPECT_EQ(pins.Wait(), "");
    pins.Add(memory.data(), 2 * 4096);
    pins.Add(memory.data() + 4 * 4096, 4096);
    EXPECT_EQ(pins.Wait(), "");
    EXPECT_EQ(fake.held, (std::map<std::byte*, std::size_t>{{memory.data(), 2 * 4096},
                                                            {memory.data() + 4 * 4096, 4096}}));
    pins.Add(memory.data() + 2 * 4096, 2 * 4096);
    EXPECT_EQ(pins.Wait(), "");
    EXPECT_EQ(fake.held.size(), 3U);
  }
  EXPECT_TRUE(fake.held.empty());
  EXPECT_EQ(fake.n_unpins, 3);
}

TEST(HostPins, ARefusalIsForGood) {
  FakePinner fake;
  fake.refuse_at = 1;
  auto memory = Pages(8);
  {
    HostPins pins(fake.Pinner());
    for (std::int64_t i = 0; i < 3; ++i) pins.Add(memory.data() + i * 4096, 4096);
    EXPECT_TRUE(Holds(pins.Wait(), "refused")) << pins.Wait();
    pins.Add(memory.data() + 3 * 4096, 4096);
    EXPECT_TRUE(Holds(pins.Wait(), "refused"));
    EXPECT_EQ(fake.n_pins, 2);
    EXPECT_EQ(fake.held.size(), 1U);
    pins.Release();
    EXPECT_TRUE(fake.held.empty());
    EXPECT_TRUE(Holds(pins.Wait(), "refused"));
  }
  EXPECT_EQ(fake.n_unpins, 1);
  fake.begin_failure = "no device";
  HostPins pins(fake.Pinner());
  pins.Add(memory.data(), 4096);
  EXPECT_EQ(pins.Wait(), "no device");
}

TEST(HostPins, MayEndBeforeAllIsRegistered) {
  FakePinner fake;
  auto memory = Pages(3);
  {
    HostPins pins(fake.Pinner());
    fake.wait = true;
    for (std::int64_t i = 0; i < 3; ++i) pins.Add(memory.data() + i * 4096, 4096);
    fake.wait = false;
  }
  EXPECT_TRUE(fake.held.empty());
}

TEST(HostArena, MoreThanTheMachineHasIsRefused) {
  if (AvailableMemoryBytes() == 0) GTEST_SKIP() << "the system does not say what is available";
  FakePinner fake;
  const std::string message =
      ErrorOf(ErrorCode::kNoMemory, [&] { HostArena(std::int64_t{1} << 50, fake.Pinner()); });
  EXPECT_TRUE(Holds(message, "1048576.0 GiB")) << message;
  EXPECT_TRUE(Holds(message, "available")) << message;
  EXPECT_EQ(fake.n_pins, 0);
}

TEST(HostArena, WithoutADeviceIsPageable) {
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) == cudaSuccess && n_devices > 0) {
    GTEST_SKIP() << "there is a device";
  }
  HostArena arena(kPage);
  arena.Wait();
  EXPECT_FALSE(arena.pinned());
  EXPECT_TRUE(Holds(arena.reason(), "cuda")) << arena.reason();
}

TEST(HostArena, CopiesAcrossPieces) {
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
    GTEST_SKIP() << "no CUDA device";
  }
  HostArena pinned(8 * kPage, CudaPinner(), 2 * kPage);
  FakePinner refusing;
  refusing.begin_failure = "no device";
  HostArena pageable(8 * kPage, refusing.Pinner(), 2 * kPage);
  const Stream stream;
  const std::int64_t bytes = 5 * kPage + 12345;
  const DeviceBuffer<std::byte> device(static_cast<std::size_t>(bytes));
  for (HostArena* arena : {&pinned, &pageable}) {
    arena->Wait();
    EXPECT_EQ(arena->pinned(), arena == &pinned) << arena->reason();
    std::byte* const from = arena->data() + 777;
    for (std::int64_t i = 0; i < bytes; ++i) from[i] = static_cast<std::byte>(i * 7 / 13);
    const std::vector<std::byte> wanted(from, from + bytes);
    arena->CopyToDevice(device.data(), from, bytes, stream.get());
    stream.Wait();
    std::byte* const back = arena->data() + kPage + 1;
    std::fill_n(back, bytes, std::byte{0});
    arena->CopyToHost(back, device.data(), bytes, stream.get());
    stream.Wait();
    EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), back));
    arena->CopyToDevice(device.data(), from, 0, stream.get());
  }
  // What a kernel would do: the same address is the device's.
  cudaPointerAttributes attributes{};
  Check(cudaPointerGetAttributes(&attributes, pinned.data() + 3 * kPage),
        "cudaPointerGetAttributes");
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_EQ(attributes.devicePointer, pinned.device_data() + 3 * kPage);
}

}  // namespace
}  // namespace fathom::cuda
