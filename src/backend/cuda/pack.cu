// SPDX-License-Identifier: MIT
#include <cuda_fp16.h>

#include "backend/cuda/check.h"
#include "backend/cuda/pack.h"

namespace fathom::cuda {
namespace {

constexpr int kGroupBlocks = 16;  // packed together: 128 bytes of a plane
constexpr int kChannels = 32;     // of a block of threads
constexpr int kThreads = 128;     // a thread has one channel of every fourth block

struct Shared {
  std::uint64_t word[kChannels * kPlanes][kGroupBlocks];
  std::uint16_t side[kChannels][kGroupBlocks];  // mean codes, or scales
};

// clip(floor(v), -8, 7) + 8; a NaN becomes 0.
__device__ int Code(float v) {
  const float cell = floorf(v);
  if (!(cell >= -8.0F)) return 0;
  return cell > 7.0F ? 15 : static_cast<int>(cell) + 8;
}

__device__ int MeanCode(float sum, float step, int limit) {
  const float code = rintf(sum / 64.0F / step);
  if (!(code >= static_cast<float>(-limit))) return -limit;
  return code > static_cast<float>(limit) ? limit : static_cast<int>(code);
}

// One channel of one block.
class Keys {
 public:
  __device__ Keys(const PackBlocks& p, int head, int block, int channel) {
    const std::int64_t token = std::int64_t{block} * kBlockTokens;
    if (p.x != nullptr) {
      x_ = p.x + (std::int64_t{head} * p.n_blocks * kBlockTokens + token) * p.head_dim + channel;
      stride_ = p.head_dim;
    } else {
      rows_ = reinterpret_cast<const __half*>(p.rows[head]) + token * 2 * p.head_dim + channel;
      stride_ = 2 * p.head_dim;
      if (p.center != nullptr) center_ = p.center[head * p.head_dim + channel];
    }
  }
  __device__ float operator[](int i) const {
    if (x_ != nullptr) return x_[i * stride_];
    return __half2float(rows_[i * stride_]) - center_;
  }

 private:
  const float* x_ = nullptr;
  const __half* rows_ = nullptr;
  int stride_ = 0;
  float center_ = 0;
};

__device__ void PackChannel(const PackBlocks& p, int head, int channel, const Keys& keys,
                            std::uint64_t (&word)[kPlanes], std::uint16_t* side) {
  float offset = 0, cell = 0;
  bool zero = false;
  if (p.codec == Codec::kMean) {
    float sum = 0;
    for (int i = 0; i < kBlockTokens; ++i) sum += keys[i];
    const float step = p.mean_step[head * p.head_dim + channel];
    const int mean = MeanCode(sum, step, (1 << (p.mean_bits - 1)) - 1);
    *side = static_cast<std::uint16_t>(mean);
    offset = static_cast<float>(mean) * step;
    cell = p.range[head * p.head_dim + channel] / 8.0F;
  } else {
    float top = 0;
    for (int i = 0; i < kBlockTokens; ++i) {
      const float x = fabsf(keys[i]);
      if (x > top) top = x;
    }
    const __half scale = __float2half_rn(top);
    *side = __half_as_ushort(scale);
    zero = __half2float(scale) == 0;
    cell = __half2float(scale) / 8.0F;
  }
  for (int i = 0; i < kBlockTokens; ++i) {
    const int code = zero ? 8 : Code((keys[i] - offset) / cell);
    for (int b = 0; b < kPlanes; ++b) {
      word[b] |= static_cast<std::uint64_t>(code >> (kPlanes - 1 - b) & 1) << i;
    }
  }
}

// A row of words leaves by 16 bytes a thread, or word by word at the ends of a call.
__device__ void WriteWords(const PackBlocks& p, int head, int first_channel, int begin, int end,
                           int group, const Shared& shared) {
  const int n_rows = min(kChannels, p.head_dim - first_channel) * kPlanes;
  std::uint64_t* planes = p.planes[head] + std::int64_t{first_channel} * kPlanes * p.plane_stride;
  for (int i = static_cast<int>(threadIdx.x); i < n_rows * kGroupBlocks / 2; i += kThreads) {
    const int row = i / (kGroupBlocks / 2), b = i % (kGroupBlocks / 2) * 2;
    std::uint64_t* to = planes + row * p.plane_stride + group * kGroupBlocks + b;
    const int block = group * kGroupBlocks + b;
    if (block >= begin && block + 1 < end) {
      *reinterpret_cast<ulonglong2*>(to) = {shared.word[row][b], shared.word[row][b + 1]};
    } else {
      if (block >= begin && block < end) to[0] = shared.word[row][b];
      if (block + 1 >= begin && block + 1 < end) to[1] = shared.word[row][b + 1];
    }
  }
}

__device__ void WriteSide(const PackBlocks& p, int head, int first_channel, int begin, int end,
                          int group, const Shared& shared) {
  const int n = min(kChannels, p.head_dim - first_channel) * kGroupBlocks / 2;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    const int channel = i / (kGroupBlocks / 2), b = i % (kGroupBlocks / 2) * 2;
    std::uint8_t* row = p.side[head] + (first_channel + channel) * p.side_stride;
    const int block = group * kGroupBlocks + b;
    const bool first = block >= begin && block < end,
               second = block + 1 >= begin && block + 1 < end;
    const std::uint16_t one = shared.side[channel][b], two = shared.side[channel][b + 1];
    if (p.codec == Codec::kPaper) {
      if (first) reinterpret_cast<std::uint16_t*>(row)[block] = one;
      if (second) reinterpret_cast<std::uint16_t*>(row)[block + 1] = two;
    } else if (p.mean_bits == 8) {
      if (first) row[block] = static_cast<std::uint8_t>(one);
      if (second) row[block + 1] = static_cast<std::uint8_t>(two);
    } else if (first || second) {
      const std::uint8_t old = first && second ? 0 : row[block / 2];
      const int low = first ? static_cast<std::int16_t>(one) + 8 : old & 15;
      const int high = second ? static_cast<std::int16_t>(two) + 8 : old >> 4;
      row[block / 2] = static_cast<std::uint8_t>(low | high << 4);
    }
  }
}

__global__ void __launch_bounds__(kThreads) PackKernel(PackBlocks p) {
  __shared__ Shared shared;
  const int head = static_cast<int>(blockIdx.z);
  const int first_channel = static_cast<int>(blockIdx.y) * kChannels;
  const int group = p.first_block / kGroupBlocks + static_cast<int>(blockIdx.x);
  const int begin = p.first_block, end = p.first_block + p.n_blocks;
  const int in = static_cast<int>(threadIdx.x) % kChannels, channel = first_channel + in;
  for (int b = static_cast<int>(threadIdx.x) / kChannels; b < kGroupBlocks;
       b += kThreads / kChannels) {
    const int block = group * kGroupBlocks + b;
    if (block < begin || block >= end || channel >= p.head_dim) continue;
    std::uint64_t word[kPlanes] = {};
    PackChannel(p, head, channel, Keys(p, head, block - begin, channel), word, &shared.side[in][b]);
    for (int i = 0; i < kPlanes; ++i) shared.word[in * kPlanes + i][b] = word[i];
  }
  __syncthreads();
  WriteWords(p, head, first_channel, begin, end, group, shared);
  WriteSide(p, head, first_channel, begin, end, group, shared);
}

}  // namespace

void Pack(const PackBlocks& pack, cudaStream_t stream) {
  if (pack.n_heads == 0 || pack.n_blocks == 0) return;
  const int first = pack.first_block / kGroupBlocks;
  const int last = (pack.first_block + pack.n_blocks - 1) / kGroupBlocks;
  const dim3 grid(static_cast<unsigned>(last - first + 1),
                  static_cast<unsigned>((pack.head_dim + kChannels - 1) / kChannels),
                  static_cast<unsigned>(pack.n_heads));
  PackKernel<<<grid, kThreads, 0, stream>>>(pack);
  CheckLaunch("Pack");
}

}  // namespace fathom::cuda
