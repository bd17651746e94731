// SPDX-License-Identifier: MIT
#include <array>
#include <cassert>
#include <cstring>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/pack.h"
#include "store/layout.h"

namespace fathom {
namespace {

// A pair of blocks on the device, of which the call packs one: nibbles of two share a byte.
constexpr int kPairBlocks = 2;

void WriteBack(const PackArgs& a, const std::vector<std::uint64_t>& words,
               const std::vector<std::uint8_t>& side) {
  const int at = a.block % kPairBlocks;
  for (std::int32_t row = 0; row < a.head_dim * kPlanes; ++row) {
    a.planes[layout::PlaneWord(row / kPlanes, row % kPlanes, a.block,
                               RowBlocks(a, a.segment_blocks))] =
        words[static_cast<std::size_t>(row * kPairBlocks + at)];
  }
  const std::size_t to_row = layout::SideRowBytes(a.codec, a.mean_bits, a.segment_blocks);
  const std::size_t from_row = layout::SideRowBytes(a.codec, a.mean_bits, kPairBlocks);
  for (std::size_t j = 0; j < static_cast<std::size_t>(a.head_dim); ++j) {
    const std::uint8_t* from = side.data() + j * from_row;
    std::uint8_t* to = a.side + j * to_row;
    if (a.codec == Codec::kPaper) {
      std::memcpy(to + static_cast<std::size_t>(a.block) * sizeof(Half),
                  from + static_cast<std::size_t>(at) * sizeof(Half), sizeof(Half));
    } else if (a.mean_bits == 8) {
      to[a.block] = from[at];
    } else {
      to[a.block / 2] =
          layout::PackNibble(to[a.block / 2], a.block, layout::UnpackNibble(*from, at));
    }
  }
}

}  // namespace

void CudaBackend::Pack(const PackArgs& a) const {
  assert(a.block >= 0 && a.block < a.segment_blocks && a.segment_blocks % 2 == 0);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto dim = static_cast<std::size_t>(a.head_dim);
  std::vector<std::uint64_t> words(dim * kPlanes * kPairBlocks);
  std::vector<std::uint8_t> side(layout::SideBytes(a.codec, a.head_dim, a.mean_bits, kPairBlocks));
  const cuda::DeviceBuffer<float> x({a.x, dim * kBlockTokens});
  cuda::DeviceBuffer<float> step, range;
  if (a.codec == Codec::kMean) {
    step = cuda::DeviceBuffer<float>({a.mean_step, dim});
    range = cuda::DeviceBuffer<float>({a.range, dim});
  }
  const cuda::DeviceBuffer<std::uint64_t> device_words(words.size());
  const cuda::DeviceBuffer<std::uint8_t> device_side(
      std::span<const std::uint8_t>(side.data(), side.size()));
  const std::array planes{device_words.data()};
  const std::array sides{device_side.data()};
  const cuda::DeviceBuffer<std::uint64_t*> plane_list(
      std::span<std::uint64_t* const>(planes.data(), 1));
  const cuda::DeviceBuffer<std::uint8_t*> side_list(
      std::span<std::uint8_t* const>(sides.data(), 1));
  cuda::Pack({.codec = a.codec,
              .head_dim = a.head_dim,
              .mean_bits = a.mean_bits,
              .n_heads = 1,
              .first_block = a.block % kPairBlocks,
              .n_blocks = 1,
              .x = x.data(),
              .rows = nullptr,
              .center = nullptr,
              .mean_step = step.data(),
              .range = range.data(),
              .planes = plane_list.data(),
              .plane_stride = kPairBlocks,
              .side = side_list.data(),
              .side_stride = static_cast<std::int64_t>(
                  layout::SideRowBytes(a.codec, a.mean_bits, kPairBlocks))},
             stream_.get());
  stream_.Wait();
  cuda::Check(cudaMemcpy(words.data(), device_words.data(), words.size() * sizeof(std::uint64_t),
                         cudaMemcpyDeviceToHost),
              "cudaMemcpy to the host");
  cuda::Check(cudaMemcpy(side.data(), device_side.data(), side.size(), cudaMemcpyDeviceToHost),
              "cudaMemcpy to the host");
  WriteBack(a, words, side);
}

}  // namespace fathom
