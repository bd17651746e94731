// SPDX-License-Identifier: MIT
#include <cuda_fp16.h>

#include "backend/cuda/check.h"
#include "device/synthetic.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDriftTokens = 256;  // between the points that keys drift through
// With these shares two winners fall into a block that has any, as they do on captures of 128k
// tokens (37 % of the blocks hold the union of four heads' best 476).
constexpr float kSlow = 0.6F;
constexpr float kFast = 0.8F;

// A hash that passes for random: the finaliser of splitmix64.
__device__ std::uint64_t Hash(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Nearly normal: the sum of eight uniform bytes has mean 1020 and standard deviation 209.
__device__ float Normal(std::uint64_t place) {
  const std::uint64_t bits = Hash(place);
  const auto low = static_cast<std::uint32_t>(bits), high = static_cast<std::uint32_t>(bits >> 32);
  const std::uint32_t sum = __dp4a(low, 0x01010101u, __dp4a(high, 0x01010101u, 0u));
  return (static_cast<float>(sum) - 1020.0F) * (1.0F / 209.0F);
}

__device__ float Key(const SyntheticRows& a, int head, std::int64_t token, int j) {
  const std::uint64_t channel =
      a.seed * 0x100000001B3ull + (static_cast<std::uint64_t>(head) * a.head_dim + j);
  const std::uint64_t place = Hash(channel);
  const std::int64_t knot = token / kDriftTokens;
  const float t = static_cast<float>(token % kDriftTokens) * (1.0F / kDriftTokens);
  const float slow = Normal(place ^ static_cast<std::uint64_t>(knot) << 1) * (1 - t) +
                     Normal(place ^ static_cast<std::uint64_t>(knot + 1) << 1) * t;
  const float fast = Normal(place ^ (static_cast<std::uint64_t>(token) << 1 | 1));
  return a.sigma[head % a.n_kv_heads * a.head_dim + j] * (kSlow * slow + kFast * fast);
}

// A thread writes eight numbers.
__global__ void __launch_bounds__(kThreads) RowsKernel(SyntheticRows a) {
  const int head = static_cast<int>(blockIdx.y);
  const int per_row = 2 * a.head_dim / 8;
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < a.n * per_row;
       i += gridDim.x * std::int64_t{kThreads}) {
    const std::int64_t token = a.first + i / per_row;
    const int at = static_cast<int>(i % per_row) * 8;
    __half2 v[4];
    for (int k = 0; k < 8; k += 2) {
      float x[2];
      for (int e = 0; e < 2; ++e) {
        const int j = at + k + e;
        x[e] =
            j < a.head_dim
                ? Key(a, head, token, j)
                : Normal(a.seed ^ Hash((static_cast<std::uint64_t>(head) << 40) + token * 512 + j));
      }
      v[k / 2] = __floats2half2_rn(x[0], x[1]);
    }
    *reinterpret_cast<uint4*>(a.rows[head] + i / per_row * 2 * a.head_dim + at) =
        *reinterpret_cast<const uint4*>(v);
  }
}

__global__ void __launch_bounds__(kThreads)
    CodesKernel(ulonglong2* out, std::int64_t n, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < n;
       i += gridDim.x * std::int64_t{kThreads}) {
    out[i] = {Hash(seed ^ static_cast<std::uint64_t>(2 * i)),
              Hash(seed ^ static_cast<std::uint64_t>(2 * i + 1))};
  }
}

__global__ void __launch_bounds__(kThreads)
    HalfsKernel(Half* out, std::int64_t n, float deviation, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < n;
       i += gridDim.x * std::int64_t{kThreads}) {
    const float x = Normal(seed ^ static_cast<std::uint64_t>(i) << 1);
    // Deviation 0: a scale; a normal number has no more than 5 deviations here.
    const float y = deviation > 0 ? x * deviation : 1.0F + 0.1F * x;
    out[i] = __half_as_ushort(__float2half_rn(y));
  }
}

unsigned GridFor(std::int64_t items) {
  const std::int64_t blocks = (items + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 2048 ? blocks : 2048);
}

}  // namespace

void FillRows(const SyntheticRows& args, cudaStream_t stream) {
  if (args.n <= 0 || args.n_heads == 0) return;
  const dim3 grid(GridFor(args.n * args.head_dim / 4), static_cast<unsigned>(args.n_heads));
  RowsKernel<<<grid, kThreads, 0, stream>>>(args);
  CheckLaunch("FillRows");
}

void FillCodes(void* out, std::int64_t bytes, std::uint64_t seed, cudaStream_t stream) {
  if (bytes <= 0) return;
  CodesKernel<<<GridFor(bytes / 16), kThreads, 0, stream>>>(static_cast<ulonglong2*>(out),
                                                            bytes / 16, seed);
  CheckLaunch("FillCodes");
}

void FillNormal(Half* out, std::int64_t n, float deviation, std::uint64_t seed,
                cudaStream_t stream) {
  if (n <= 0) return;
  HalfsKernel<<<GridFor(n), kThreads, 0, stream>>>(out, n, deviation, seed);
  CheckLaunch("FillNormal");
}

void FillScales(Half* out, std::int64_t n, std::uint64_t seed, cudaStream_t stream) {
  FillNormal(out, n, 0, seed, stream);
}

}  // namespace fathom::cuda
