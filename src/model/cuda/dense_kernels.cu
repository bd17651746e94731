// SPDX-License-Identifier: MIT
// The kernels that treat every element, or every row as a whole.
#include "model/cuda/dense_kernels.h"

#include <cuda_bf16.h>

#include "backend/cuda/check.h"
#include "backend/cuda/follow.cuh"
#include "backend/cuda/lists.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kMostRows = 65535;  // of a grid's second dimension; kernels stride over the rest

__device__ float Low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ float High(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ unsigned Pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

dim3 RowGrid(std::int32_t n, std::int32_t per_row) {
  const auto rows = static_cast<unsigned>(n);
  return {static_cast<unsigned>((per_row + kThreads - 1) / kThreads),
          rows < kMostRows ? rows : kMostRows};
}
unsigned FlatGrid(std::int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

// A thread has 8 channels.
__global__ void __launch_bounds__(kThreads) EmbedRows(EmbedArgs args) {
  Follow();
  const int c = blockIdx.x * kThreads + threadIdx.x;
  const int pieces = args.width / 8;
  if (c >= pieces) return;
  for (int row = blockIdx.y; row < args.n; row += gridDim.y) {
    const std::int64_t token = args.tokens[row];
    const uint4 from = reinterpret_cast<const uint4*>(args.table)[token * pieces + c];
    float4* to = reinterpret_cast<float4*>(args.x + static_cast<std::int64_t>(row) * args.width);
    to[2 * c] = {Low(from.x), High(from.x), Low(from.y), High(from.y)};
    to[2 * c + 1] = {Low(from.z), High(from.z), Low(from.w), High(from.w)};
  }
}

// The products with theta_scale are those of ggml, one rounding after the other: at positions in
// the hundred thousands the last bits of an angle turn a pair visibly. Cosine and sine are taken of
// half turns in double precision, which needs no slow path for large angles.
__global__ void __launch_bounds__(kThreads) RopeAngles(AnglesArgs args) {
  Follow();
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= static_cast<std::int64_t>(args.n) * args.n_pairs) return;
  const std::int64_t row = at / args.n_pairs;
  const int pair = static_cast<int>(at - row * args.n_pairs);
  float base = static_cast<float>(args.positions[row]);
  for (int i = 0; i < pair; ++i) base *= args.theta_scale;
  const float own = args.factors == nullptr ? base : base / args.factors[pair];
  float theta = args.freq_scale * own;
  if (args.ext_factor != 0) {
    const float width = fmaxf(0.001F, args.corr_high - args.corr_low);
    const float y = (static_cast<float>(pair) - args.corr_low) / width;
    const float mix = (1.0F - fminf(1.0F, fmaxf(0.0F, y))) * args.ext_factor;
    theta = theta * (1.0F - mix) + own * mix;
  }
  constexpr double kInversePi = 0.318309886183790671538;
  double sine = 0;
  double cosine = 0;
  sincospi(static_cast<double>(theta) * kInversePi, &sine, &cosine);
  args.angles[at] = {static_cast<float>(cosine) * args.magnitude,
                     static_cast<float>(sine) * args.magnitude};
}

__device__ float GatedUp(float gate, float up) { return gate / (1.0F + expf(-gate)) * up; }

// A thread has 4 channels.
__global__ void __launch_bounds__(kThreads) SwigluRows(SwigluArgs args) {
  Follow();
  const int c = blockIdx.x * kThreads + threadIdx.x;
  const int pieces = args.width / 4;
  if (c >= pieces) return;
  for (int row = blockIdx.y; row < args.n; row += gridDim.y) {
    const float4* in =
        reinterpret_cast<const float4*>(args.gate_up) + 2 * static_cast<std::int64_t>(row) * pieces;
    float4 gate = in[c];
    float4 up = in[pieces + c];
    if (args.bias != nullptr) {
      const float4 b = reinterpret_cast<const float4*>(args.bias)[c];
      const float4 u = reinterpret_cast<const float4*>(args.bias)[pieces + c];
      gate = {gate.x + b.x, gate.y + b.y, gate.z + b.z, gate.w + b.w};
      up = {up.x + u.x, up.y + u.y, up.z + u.z, up.w + u.w};
    }
    uint2* out = reinterpret_cast<uint2*>(args.out) + static_cast<std::int64_t>(row) * pieces;
    out[c] = {Pack(GatedUp(gate.x, up.x), GatedUp(gate.y, up.y)),
              Pack(GatedUp(gate.z, up.z), GatedUp(gate.w, up.w))};
  }
}

// A thread has 8 numbers.
__global__ void __launch_bounds__(kThreads) ConvertAll(ConvertArgs args) {
  Follow();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= args.n / 8) return;
  const float4 a = reinterpret_cast<const float4*>(args.x)[2 * i];
  const float4 b = reinterpret_cast<const float4*>(args.x)[2 * i + 1];
  reinterpret_cast<uint4*>(args.out)[i] = {Pack(a.x, a.y), Pack(a.z, a.w), Pack(b.x, b.y),
                                           Pack(b.z, b.w)};
}

__global__ void __launch_bounds__(kThreads) AddBias(BiasArgs args) {
  Follow();
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= args.width) return;
  const float bias = args.bias[c];
  for (int row = blockIdx.y; row < args.n; row += gridDim.y) {
    args.x[static_cast<std::int64_t>(row) * args.width + c] += bias;
  }
}

constexpr int kArgmaxThreads = 1024;

__device__ std::uint64_t WarpMax(std::uint64_t key) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const std::uint64_t other =
        __shfl_xor_sync(0xFFFFFFFFu, static_cast<unsigned long long>(key), offset);
    key = key > other ? key : other;
  }
  return key;
}

// One block per row. Keys of candidates have the wanted order: see CandidateKey.
__global__ void __launch_bounds__(kArgmaxThreads) ArgmaxRows(ArgmaxArgs args) {
  Follow();
  const float* x = args.x + static_cast<std::int64_t>(blockIdx.x) * args.width;
  std::uint64_t best = 0;  // below every key
#pragma unroll 8
  for (int i = threadIdx.x; i < args.width; i += kArgmaxThreads) {
    const std::uint64_t key = CandidateKey(x[i], i);
    best = best > key ? best : key;
  }
  __shared__ std::uint64_t partial[kArgmaxThreads / 32];
  best = WarpMax(best);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = WarpMax(partial[threadIdx.x]);
  if (threadIdx.x == 0) args.places[blockIdx.x] = TokenOf(best);
}

// Two independent normal numbers from a seed and a number: mixing in the manner of splitmix64, then
// Box and Muller.
__device__ float2 NormalPair(std::uint64_t seed, std::int64_t i) {
  std::uint64_t z = seed + (static_cast<std::uint64_t>(i) + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  const float u = (static_cast<float>(static_cast<std::uint32_t>(z) >> 8) + 1.0F) * 0x1p-24F;
  const float turn = static_cast<float>(static_cast<std::uint32_t>(z >> 40)) * 0x1p-24F;
  const float radius = sqrtf(-2.0F * logf(u));
  float sine = 0;
  float cosine = 0;
  sincospif(2.0F * turn, &sine, &cosine);
  return {radius * cosine, radius * sine};
}

// A thread has 8 numbers.
__global__ void __launch_bounds__(kThreads) RandomBf16(RandomBf16Args args) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= args.n / 8) return;
  unsigned packed[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 pair = NormalPair(args.seed, 4 * i + j);
    packed[j] = Pack(pair.x * args.deviation, pair.y * args.deviation);
  }
  reinterpret_cast<uint4*>(args.out)[i] = {packed[0], packed[1], packed[2], packed[3]};
}

__global__ void __launch_bounds__(kThreads) RandomFloat(RandomFloatArgs args) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= args.n) return;
  args.out[i] = args.middle + args.deviation * NormalPair(args.seed, i).x;
}

}  // namespace

void LaunchEmbed(const EmbedArgs& args, cudaStream_t stream) {
  if (args.n == 0) return;
  LaunchFollower("EmbedRows", EmbedRows, RowGrid(args.n, args.width / 8), kThreads, 0, stream,
                 args);
}

void LaunchAngles(const AnglesArgs& args, cudaStream_t stream) {
  if (args.n == 0) return;
  const std::int64_t all = static_cast<std::int64_t>(args.n) * args.n_pairs;
  LaunchFollower("RopeAngles", RopeAngles, FlatGrid(all), kThreads, 0, stream, args);
}

void LaunchSwiglu(const SwigluArgs& args, cudaStream_t stream) {
  if (args.n == 0) return;
  LaunchFollower("SwigluRows", SwigluRows, RowGrid(args.n, args.width / 4), kThreads, 0, stream,
                 args);
}

void LaunchConvert(const ConvertArgs& args, cudaStream_t stream) {
  if (args.n == 0) return;
  LaunchFollower("ConvertAll", ConvertAll, FlatGrid(args.n / 8), kThreads, 0, stream, args);
}

void LaunchBias(const BiasArgs& args, cudaStream_t stream) {
  if (args.n == 0) return;
  LaunchFollower("AddBias", AddBias, RowGrid(args.n, args.width), kThreads, 0, stream, args);
}

void LaunchArgmax(const ArgmaxArgs& args, cudaStream_t stream) {
  if (args.n == 0) return;
  LaunchFollower("ArgmaxRows", ArgmaxRows, static_cast<unsigned>(args.n), kArgmaxThreads, 0, stream,
                 args);
}

void LaunchRandomBf16(const RandomBf16Args& args, cudaStream_t stream) {
  if (args.n == 0) return;
  RandomBf16<<<FlatGrid(args.n / 8), kThreads, 0, stream>>>(args);
  CheckLaunch("RandomBf16");
}

void LaunchRandomFloat(const RandomFloatArgs& args, cudaStream_t stream) {
  if (args.n == 0) return;
  RandomFloat<<<FlatGrid(args.n), kThreads, 0, stream>>>(args);
  CheckLaunch("RandomFloat");
}

}  // namespace fathom::cuda
