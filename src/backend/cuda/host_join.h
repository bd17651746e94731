// SPDX-License-Identifier: MIT
// What Select and Rank of CudaBackend share: a selection from scores on the device whose union over
// the group goes to the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "backend/cuda/buffer.h"
#include "backend/cuda/lists.h"

namespace fathom::cuda {

// Out, in host memory, of one KV head: as in SelectHead.
struct HostAttended {
  std::int32_t* tokens;
  std::uint16_t* mask;
  std::int64_t* n_attended;
};

// One selection of all heads of a call, which have the same lengths.
class HostSelection {
 public:
  // lengths.keep >= 1; n_heads >= 1.
  HostSelection(const Lengths& lengths, std::int32_t group, std::int32_t n_heads,
                cudaStream_t stream);

  // Selects from scores [n_heads * group][stride] in device memory.
  void Select(const float* scores, std::int64_t stride);
  // Their union over each group, to the host. Returns when it is there.
  void Join(std::span<const HostAttended> out);

  std::int32_t group() const { return group_; }
  std::int32_t n_lists() const { return n_lists_; }
  // Device memory, set by Select.
  const Lengths* lengths() const { return device_lengths_.data(); }  // of the one sequence
  const std::int32_t* winners() const { return winners_.data(); }    // [n_lists][keep], no order
  const std::uint64_t* kth_key() const { return kth_key_.data(); }   // [n_lists]

 private:
  Lengths lengths_;
  std::int32_t group_;
  std::int32_t n_lists_;
  cudaStream_t stream_;
  DeviceBuffer<Lengths> device_lengths_;
  DeviceBuffer<std::int32_t> winners_;
  DeviceBuffer<std::uint64_t> kth_key_;
  DeviceBuffer<float> cut_;
};

// A distance between lists of n scores that every kernel takes.
constexpr std::int64_t ScoreStride(std::int64_t n) {
  return (n + kTileTokens - 1) / kTileTokens * kTileTokens;
}

}  // namespace fathom::cuda
