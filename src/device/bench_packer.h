// SPDX-License-Identifier: MIT
// What the indexes of the step bench share: their memory, and keys packed a chunk of blocks at a
// time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/cuda/buffer.h"
#include "backend/cuda/pack.h"
#include "device/bench_index.h"
#include "device/bench_keys.h"

namespace fathom::cuda {

inline std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

template <typename T>
DeviceBuffer<T> ToDevice(const std::vector<T>& host) {
  return DeviceBuffer<T>(std::span<const T>(host));
}

// Memory of an index: of the arena, or of the device.
class Memory {
 public:
  Memory(HostArena* arena, bool on_host) : arena_(on_host ? arena : nullptr) {}
  std::byte* Take(std::int64_t bytes) {
    if (arena_ != nullptr) return arena_->Allocate(bytes);
    device_.emplace_back(Size(bytes));
    return device_.back().data();
  }

 private:
  HostArena* arena_;
  std::vector<DeviceBuffer<std::byte>> device_;
};

// What an index is made of and where; all borrowed.
struct BenchParts {
  BenchPlace place;
  BenchKeys* keys;
  const Lengths* lengths;
  HostArena* arena;
  cudaStream_t stream;
  const BenchProgress& progress;

  IndexSizes sizes() const {
    return {place.sizes.heads, place.sizes.batch, place.cap_blocks(), lengths};
  }
  // A layer is done: waits for it and says so.
  void Done(std::int32_t layer) const {
    Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    if (progress) progress(layer + 1, place.sizes.n_layers);
  }
};

// Rows of a layer, a chunk of blocks at a time.
class Packer {
 public:
  explicit Packer(const BenchParts& parts);

  // Calls use(first, n) for chunks of all finished blocks, whose rows are at rows() then.
  template <typename Use>
  void ForChunks(std::int32_t layer, const Use& use) {
    const std::int64_t n_blocks = n_tokens_ / kBlockTokens;
    for (std::int64_t first = 0; first < n_blocks; first += kChunkBlocks) {
      const std::int64_t n = std::min(kChunkBlocks, n_blocks - first);
      keys_->Fill(layer, pointers_.data(), first * kBlockTokens, n * kBlockTokens, stream_);
      use(first, n);
    }
  }
  Half* const* rows() const { return pointers_.data(); }

  // base: what PackBlocks says beside the rows and the blocks.
  void Pack(std::int32_t layer, PackBlocks base);

 private:
  static constexpr std::int64_t kChunkBlocks = 512;

  BenchKeys* const keys_;
  const std::int64_t n_tokens_;
  const cudaStream_t stream_;
  DeviceBuffer<Half> rows_;
  DeviceBuffer<Half*> pointers_;
};

// One for each kind of method.
std::unique_ptr<BenchIndex> MakeMeanBench(const BenchMethod& method, const BenchParts& parts);
std::unique_ptr<BenchIndex> MakePaperBench(const BenchMethod& method, const BenchParts& parts);
std::unique_ptr<BenchIndex> MakeLabelBench(const BenchMethod& method, const BenchParts& parts);
std::unique_ptr<BenchIndex> MakeKeyBench(const BenchMethod& method, const BenchParts& parts);

}  // namespace fathom::cuda
