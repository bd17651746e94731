// SPDX-License-Identifier: MIT
// The device side of CUDA on a processor: what translate.py makes of kernels is compiled against
// this instead of nvcc's own declarations, and they run one thread at a time.
//
// Emulated, because kernels are wrong without it:
//   - barriers of a block and of a warp, with threads that reach them in any order, or have left;
//   - shuffles, votes, reductions and matrix products among all 32 lanes of a warp: a lane that is
//     missing is a deadlock, which is reported;
//   - divergence: lanes of a warp run apart until they meet, and other warps run in between;
//   - shared memory that holds what the block before left (static), or a pattern (dynamic, which
//     ends at a page that faults); device memory as runtime.cc says.
// Not emulated: blocks beside each other and the order in which one sees what another wrote (blocks
// run one after another), when asynchronous copies arrive (at once), the last bits of ex2.approx
// and of sums inside a matrix product of halves, masks of part of a warp, and what anything costs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#undef __noinline__
#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks run one after another, so one copy serves all of them
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__

// Of the thread that runs now.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace fathom::emulation {

// Ends the process: for mistakes of kernels and for what is not emulated.
[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// --- The host's side of a launch -----------------------------------------------------------------

// What <<<grid, threads, shared, stream>>> does; `body` calls the kernel with its arguments.
// follows: it may begin before what precedes it has ended, and its threads have to wait for that.
void Launch(const void* kernel, dim3 grid, int threads, std::size_t shared, cudaStream_t stream,
            std::function<void()> body, bool follows = false);
// Does the work now or later, or records it if the stream does (runtime.cc).
void Enqueue(cudaStream_t stream, std::function<void()> work);
// Whether `bytes` bytes at p lie in one allocation of the device (runtime.cc).
bool IsDeviceMemory(const void* p, std::size_t bytes);
// What the next cudaGetLastError returns (runtime.cc).
void SetLastError(cudaError_t error);

template <typename R, typename... Args>
const void* AddressOf(R (*kernel)(Args...)) {
  return reinterpret_cast<const void*>(kernel);
}
// True one time in four, as FATHOM_EMULATION_SEED has it.
bool DrawsOne();
cudaError_t SetKernelAttribute(const void* kernel, cudaFuncAttribute attribute, int value);

// --- What a thread can do ------------------------------------------------------------------------

struct Votes {
  int count;
  bool any, all;
};

Votes SyncBlock(bool vote);
// Of kernels launched to follow others: waits for what precedes the kernel; lets what follows
// begin; works without having waited, which the kernel before must have allowed by waiting first.
void WaitForPrevious();
void LetNextBegin();
void WorkBeside();
// Lets other threads run, now and then: called where a kernel may see what they do.
void MaybeYield();
// What each lane of the warp gave, once all have. Valid until this lane's next exchange.
const std::uint64_t* Exchange(std::uint64_t value);

unsigned char* DynamicShared();
unsigned SharedAddress(const void* p);
// 16 bytes to shared memory: the first `bytes` of `from`, then zeros.
void CopyAsync(unsigned to, const void* from, int bytes = 16);
// ldmatrix of four 8 x 8 matrices of halves: lane 8i + j gives the address of row j of matrix i.
void LoadMatrices(bool transposed, const std::array<std::uint32_t*, 4>& to, unsigned row);

// d = a * b + c on the fragments of mma.m16n8k32 (bytes, b signed) and mma.m16n8k16 (halves).
void MmaBytes(bool a_signed, const std::array<int*, 4>& d, const std::array<std::uint32_t, 4>& a,
              const std::array<std::uint32_t, 2>& b, const std::array<int, 4>& c);
void MmaHalves(const std::array<float*, 4>& d, const std::array<std::uint32_t, 4>& a,
               const std::array<std::uint32_t, 2>& b, const std::array<float, 4>& c);

inline int Lane() { return static_cast<int>(threadIdx.x % 32); }

template <typename T>
std::uint64_t ToBits(T value) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
T FromBits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// The value of lane `from`, or one's own where there is no such lane.
template <typename T>
T Shuffle(T value, int from) {
  const std::uint64_t* lanes = Exchange(ToBits(value));
  return from < 0 || from > 31 ? value : FromBits<T>(lanes[from]);
}

template <typename T, typename Op>
T Reduce(T value, const Op& op) {
  const std::uint64_t* lanes = Exchange(ToBits(value));
  T result = FromBits<T>(lanes[0]);
  for (int i = 1; i < 32; ++i) result = op(result, FromBits<T>(lanes[i]));
  return result;
}

// What wider loads than the type's alignment do on the device is a fault.
template <typename T>
T Load(const T* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T) != 0) Fail("misaligned load from %p", p);
  MaybeYield();
  return *p;
}
inline void LoadVector(const std::array<std::uint32_t*, 4>& to, const void* from) {
  const uint4 v = Load(static_cast<const uint4*>(from));
  *to[0] = v.x, *to[1] = v.y, *to[2] = v.z, *to[3] = v.w;
}

template <typename T, typename Op>
T Atomic(T* p, const Op& op) {
  MaybeYield();
  const T old = *p;
  *p = op(old);
  return old;
}

inline float MaxOrNan(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::bit_cast<float>(0x7FFFFFFFu);
  return std::fmax(a, b);
}

// Out of range becomes the nearest integer there is, NaN becomes 0.
inline int ToInt(double rounded) {
  if (std::isnan(rounded)) return 0;
  constexpr double kLeast = std::numeric_limits<int>::min();
  constexpr double kMost = std::numeric_limits<int>::max();
  return static_cast<int>(std::clamp(rounded, kLeast, kMost));
}

}  // namespace fathom::emulation

// --- CUDA's own names ----------------------------------------------------------------------------

using std::isfinite;
using std::isnan;

// Of cuda_runtime.h, which wants nvcc.
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return fathom::emulation::SetKernelAttribute(fathom::emulation::AddressOf(kernel), attribute,
                                               value);
}

// As code for compute capability 9.0.
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel* /*kernel*/) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}

inline void __threadfence() { fathom::emulation::WorkBeside(); }
inline void __syncthreads() { fathom::emulation::SyncBlock(false); }
inline int __syncthreads_count(int p) { return fathom::emulation::SyncBlock(p != 0).count; }
inline int __syncthreads_or(int p) { return fathom::emulation::SyncBlock(p != 0).any; }
inline int __syncthreads_and(int p) { return fathom::emulation::SyncBlock(p != 0).all; }
inline void __syncwarp() { fathom::emulation::Exchange(0); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return fathom::emulation::Shuffle(value, lane & 31);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  return fathom::emulation::Shuffle(value, fathom::emulation::Lane() - static_cast<int>(delta));
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  return fathom::emulation::Shuffle(value, fathom::emulation::Lane() + static_cast<int>(delta));
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return fathom::emulation::Shuffle(value, fathom::emulation::Lane() ^ mask);
}
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
  const std::uint64_t own = fathom::emulation::ToBits(value);
  const std::uint64_t* lanes = fathom::emulation::Exchange(own);
  unsigned equal = 0;
  for (int i = 0; i < 32; ++i) equal |= static_cast<unsigned>(lanes[i] == own) << i;
  return equal;
}
inline unsigned __ballot_sync(unsigned, int p) {
  const std::uint64_t* lanes = fathom::emulation::Exchange(p != 0 ? 1 : 0);
  unsigned ballot = 0;
  for (int i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(lanes[i]) << i;
  return ballot;
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == ~0u; }
template <typename T>
T __reduce_add_sync(unsigned, T value) {
  return fathom::emulation::Reduce(value, [](T a, T b) { return a + b; });
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
  return fathom::emulation::Reduce(value, [](T a, T b) { return std::max(a, b); });
}
template <typename T>
T __reduce_min_sync(unsigned, T value) {
  return fathom::emulation::Reduce(value, [](T a, T b) { return std::min(a, b); });
}
template <typename T>
T __reduce_or_sync(unsigned, T value) {
  return fathom::emulation::Reduce(value, [](T a, T b) { return a | b; });
}

inline void cudaTriggerProgrammaticLaunchCompletion() { fathom::emulation::LetNextBegin(); }
inline void cudaGridDependencySynchronize() { fathom::emulation::WaitForPrevious(); }

template <typename T>
T __ldg(const T* p) {
  return fathom::emulation::Load(p);
}
template <typename T>
T __ldcg(const T* p) {
  return fathom::emulation::Load(p);
}
template <typename T>
T __ldcs(const T* p) {
  return fathom::emulation::Load(p);
}

template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  return fathom::emulation::Atomic(p, [=](T old) { return old + value; });
}
template <typename T>
T atomicOr(T* p, std::type_identity_t<T> value) {
  return fathom::emulation::Atomic(p, [=](T old) { return old | value; });
}
template <typename T>
T atomicMax(T* p, std::type_identity_t<T> value) {
  return fathom::emulation::Atomic(p, [=](T old) { return std::max(old, value); });
}
template <typename T>
T atomicMin(T* p, std::type_identity_t<T> value) {
  return fathom::emulation::Atomic(p, [=](T old) { return std::min(old, value); });
}

// Unlike std::max and std::min, of two types, and of a number where the other is none.
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmax(static_cast<T>(a), static_cast<T>(b));
  } else {
    return std::max(static_cast<T>(a), static_cast<T>(b));
  }
}
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmin(static_cast<T>(a), static_cast<T>(b));
  } else {
    return std::min(static_cast<T>(a), static_cast<T>(b));
  }
}

inline int __popc(unsigned v) { return std::popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return std::countl_zero(static_cast<unsigned>(v)); }

inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline int __float_as_int(float v) { return std::bit_cast<int>(v); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline int __float2int_rd(float f) { return fathom::emulation::ToInt(std::floor(f)); }
inline int __float2int_rn(float f) { return fathom::emulation::ToInt(std::nearbyint(f)); }

// The build forbids the compiler to fuse, as --fmad=false does for nvcc.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }

// Halves of a turn: what is left of whole turns is exact.
inline void sincospi(double x, double* sine, double* cosine) {
  const double angle = (x - 2 * std::nearbyint(x / 2)) * 3.14159265358979323846;
  *sine = std::sin(angle);
  *cosine = std::cos(angle);
}
inline void sincospif(float x, float* sine, float* cosine) {
  double s = 0, c = 0;
  sincospi(x, &s, &c);
  *sine = static_cast<float>(s);
  *cosine = static_cast<float>(c);
}

inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
  return __floats2half2_rn(std::fmaf(x.x, y.x, z.x), std::fmaf(x.y, y.y, z.y));
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t bytes = (std::uint64_t{b} << 32) | a;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned from = (selector >> (4 * i)) & 7;
    result |= (static_cast<unsigned>(bytes >> (8 * from)) & 0xFF) << (8 * i);
  }
  return result;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) {
    c += static_cast<std::int8_t>(a >> i) * static_cast<std::int8_t>(b >> i);
  }
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += ((a >> i) & 0xFF) * ((b >> i) & 0xFF);
  return c;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, int shift) {
  return static_cast<unsigned>((((std::uint64_t{high} << 32) | low) << (shift & 31)) >> 32);
}
inline unsigned __vavgu4(unsigned a, unsigned b) {
  unsigned result = 0;
  for (int i = 0; i < 32; i += 8) {
    result |= ((((a >> i) & 0xFF) + ((b >> i) & 0xFF) + 1) >> 1) << i;
  }
  return result;
}

inline unsigned __cvta_generic_to_shared(const void* p) {
  return fathom::emulation::SharedAddress(p);
}
inline const void* __cvta_generic_to_global(const void* p) { return p; }

template <typename... Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               const std::type_identity_t<Params>&... args) {
  bool follows = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    follows = follows || config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization;
  }
  fathom::emulation::Launch(
      fathom::emulation::AddressOf(kernel), config->gridDim, static_cast<int>(config->blockDim.x),
      config->dynamicSmemBytes, config->stream, [=] { kernel(args...); }, follows);
  return cudaPeekAtLastError();
}
