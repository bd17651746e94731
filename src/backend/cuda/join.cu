// SPDX-License-Identifier: MIT
// The union of a group's winners, sorted by counting. One CTA per head marks tokens in a bitmap and
// counts those that are new by buckets of the token axis; the place of a token in the list is what
// lies in the buckets before its own, and in its own before it. The bitmap, and the masks of the
// places, lie in shared memory where they fit, else in the head's own scratch; a barrier orders the
// phases either way.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/check.h"
#include "backend/cuda/follow.cuh"
#include "backend/cuda/radix.cuh"
#include "backend/cuda/select.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = kRadixThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kHeld = 4;                 // tokens of a thread that are read first
constexpr int kBuckets = 4 * kThreads;   // a thread owns four
constexpr int kBucketBits = 12;          // of kBuckets
constexpr int kLeastShift = 7;           // a bucket is made of whole uint4 of the bitmap
constexpr int kStaticBytes = 34 * 1024;  // shared memory of the kernel beside the dynamic one
static_assert(kBuckets == 1 << kBucketBits && kWarps == 32);

// In shared memory.
struct Shared {
  uint4 buckets[kThreads];             // new tokens of each bucket, then of those before it
  std::int32_t held[kHeld][kThreads];  // the first tokens of WinnerAt
  std::uint32_t warp_sum[kWarps];
};

// Token e of the head's winners, in rows of max_keep winners with expand tokens each. Whether the
// row is as long is the caller's to check.
__device__ inline std::int32_t WinnerAt(const JoinWinners& a, std::int32_t index, std::int32_t e) {
  const std::int32_t of_group = a.expand == 1 ? e : e / a.expand;
  const std::int32_t* winners = a.winners + static_cast<std::int64_t>(index) * a.group * a.max_keep;
  return __ldcg(winners + of_group) * a.expand + (e - of_group * a.expand);
}

// fn(token, heads that attend it) for everything the head attends; tokens may come several times.
// One loop that stays one: the kernel runs through it once or twice, and its code has to be
// fetched.
template <typename Fn>
__device__ inline void ForEachToken(const JoinWinners& a, std::int32_t index,
                                    const Lengths& lengths, const Shared& s, const Fn& fn) {
  const std::int32_t row = a.max_keep * a.expand, per_list = lengths.keep * a.expand;
  const std::int32_t n = a.group * row;
  const std::int32_t behind = max(lengths.n_tokens - lengths.last, 0);
  const std::int32_t before = min(lengths.first, lengths.n_tokens);
#pragma unroll 1
  for (auto e = static_cast<std::int32_t>(threadIdx.x); e < n + before + behind; e += kThreads) {
    std::int32_t token = 0;
    std::uint32_t attended_by = (1u << a.group) - 1;
    if (e < n) {
      const std::int32_t list = e / row;
      if (e - list * row >= per_list) continue;
      token = e < kHeld * kThreads ? s.held[e / kThreads][e % kThreads] : WinnerAt(a, index, e);
      if (token >= lengths.n_tokens) continue;
      attended_by = 1u << list;
    } else {
      token = e - n < before ? e - n : lengths.last + (e - n - before);
    }
    fn(token, attended_by);
  }
}

__device__ inline std::uint32_t Bits(const uint4& v) {
  return static_cast<std::uint32_t>(__popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w));
}

template <bool kShared>
__device__ inline uint4 LoadBits(const std::uint32_t* bitmap, std::int32_t at) {
  const auto* from = reinterpret_cast<const uint4*>(bitmap) + at;
  if constexpr (kShared) {
    return *from;
  } else {
    return __ldcg(from);  // atomics changed it behind the first-level cache
  }
}

// Marked tokens of a bucket of 1 << shift tokens that lie before `token`, which is in it.
template <bool kShared>
__device__ inline std::uint32_t MarkedBefore(const std::uint32_t* bitmap, std::int32_t token,
                                             int shift) {
  std::uint32_t count = 0;
  for (std::int32_t i = token >> shift << (shift - 7); i < token >> 7; ++i) {
    count += Bits(LoadBits<kShared>(bitmap, i));
  }
  uint4 v = LoadBits<kShared>(bitmap, token >> 7);
  const int word = token >> 5 & 3;
  const std::uint32_t below = (1u << (token & 31)) - 1;
  v.x &= word > 0 ? ~0u : below;
  v.y &= word > 1 ? ~0u : word == 1 ? below : 0;
  v.z &= word > 2 ? ~0u : word == 2 ? below : 0;
  v.w &= word == 3 ? below : 0;
  return count + Bits(v);
}

// Counts to sums of the counts before; returns the sum of all. Ends with a barrier.
__device__ inline std::uint32_t SumBuckets(Shared* s) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint4 c = s->buckets[threadIdx.x];
  const std::uint32_t own = c.x + c.y + c.z + c.w;
  const std::uint32_t in_warp = InclusiveWarpSum(own);
  if (lane == 31) s->warp_sum[warp] = in_warp;
  __syncthreads();
  const std::uint32_t of_warp = s->warp_sum[lane];
  const std::uint32_t before =
      __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0u) + in_warp - own;
  s->buckets[threadIdx.x] = {before, before + c.x, before + c.x + c.y, before + c.x + c.y + c.z};
  const std::uint32_t total = __reduce_add_sync(kAllLanes, of_warp);
  __syncthreads();
  return total;
}

// masks: by place, two in a word, zero. All marks are zero before; those in scratch after, too.
template <bool kShared>
__device__ inline void JoinHead(const JoinWinners& a, std::int32_t index, const Lengths& lengths,
                                std::uint32_t* bitmap, std::uint32_t* masks, Shared* s) {
  const auto tid = static_cast<std::int32_t>(threadIdx.x);
  auto* buckets = reinterpret_cast<std::uint32_t*>(s->buckets);
  const auto most =
      static_cast<int>(static_cast<std::uint32_t>(lengths.n_tokens - 1) >> kBucketBits);
  const int shift = max(kLeastShift, 32 - __clz(most));
  ForEachToken(a, index, lengths, *s, [&](std::int32_t token, std::uint32_t) {
    const std::uint32_t bit = 1u << (token & 31);
    if ((atomicOr(bitmap + (token >> 5), bit) & bit) == 0)
      atomicAdd(buckets + (token >> shift), 1u);
  });
  __syncthreads();
  const std::uint32_t total = SumBuckets(s);
  const auto capacity = static_cast<std::uint32_t>(a.out.capacity);
  std::int32_t* tokens = a.out.tokens + static_cast<std::int64_t>(index) * a.out.capacity;
  ForEachToken(a, index, lengths, *s, [&](std::int32_t token, std::uint32_t attended_by) {
    const std::uint32_t place =
        buckets[token >> shift] + MarkedBefore<kShared>(bitmap, token, shift);
    if (place >= capacity) return;
    tokens[place] = token;  // the same by all whose token it is
    // Atomics take 32 bits: the masks of an even place and the next one.
    atomicOr(masks + (place >> 1), attended_by << ((place & 1) * 16));
  });
  __syncthreads();
  const std::uint32_t n = min(total, capacity);
  std::uint16_t* out = a.out.mask + static_cast<std::int64_t>(index) * a.out.capacity;
  auto* by_place = reinterpret_cast<std::uint16_t*>(masks);
#pragma unroll 1
  for (auto i = static_cast<std::uint32_t>(tid); i < n; i += kThreads) {
    if constexpr (kShared) {
      out[i] = by_place[i];
    } else {
      out[i] = __ldcg(by_place + i);
      by_place[i] = 0;
    }
  }
  if constexpr (!kShared) {
    ForEachToken(a, index, lengths, *s,
                 [&](std::int32_t token, std::uint32_t) { bitmap[token >> 5] = 0; });
  }
  if (tid == 0) a.out.count[index] = static_cast<std::int32_t>(n);
}

// Dynamic shared memory: a bitmap of shared_tokens, a multiple of 128, and `capacity` masks; none
// with shared_tokens == 0.
__global__ __launch_bounds__(kThreads, 1) void JoinKernel(const JoinWinners a,
                                                          const std::int32_t shared_tokens) {
  Follow();
  extern __shared__ __align__(16) unsigned char marks[];
  __shared__ Shared s;
  const auto index = static_cast<std::int32_t>(blockIdx.x);
  const auto tid = static_cast<std::int32_t>(threadIdx.x);
  // All that is read is asked for at once: winners before it is known how many of them count.
  const Lengths lengths = a.lengths[index / a.n_kv_heads];
  std::int32_t held[kHeld];
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    const std::int32_t e = u * kThreads + tid;
    held[u] = e < a.group * a.max_keep * a.expand ? WinnerAt(a, index, e) : 0;
  }
  s.buckets[tid] = make_uint4(0, 0, 0, 0);
  if (shared_tokens != 0) {
    const std::int32_t n = shared_tokens / 128 + (a.out.capacity + 7) / 8;
#pragma unroll 4
    for (std::int32_t i = tid; i < n; i += kThreads) {
      reinterpret_cast<uint4*>(marks)[i] = make_uint4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int u = 0; u < kHeld; ++u) s.held[u][tid] = held[u];
  if (lengths.keep == 0) {
    if (tid == 0) a.out.count[index] = -1;
    return;
  }
  __syncthreads();
  if (lengths.n_tokens <= shared_tokens) {
    auto* bitmap = reinterpret_cast<std::uint32_t*>(marks);
    JoinHead<true>(a, index, lengths, bitmap, bitmap + shared_tokens / 32, &s);
  } else {
    JoinHead<false>(a, index, lengths, a.bitmap + index * a.words_per_head,
                    reinterpret_cast<std::uint32_t*>(a.masks + index * a.max_tokens), &s);
  }
}

// Tokens whose bitmap fits into `bytes` of shared memory, masks beside it.
std::int32_t SharedTokens(const JoinWinners& a, std::int64_t bytes) {
  const std::int64_t left = bytes - (std::int64_t{a.out.capacity} + 7) / 8 * 16;
  const std::int64_t wanted = (a.max_tokens + 127) / 128 * 128;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(left * 8 / 128 * 128, 0, wanted));
}

}  // namespace

void Join(const JoinWinners& args, cudaStream_t stream) {
  const std::int32_t n_heads = args.n_lists / args.group;
  if (n_heads == 0) return;
  int device = 0, most_bytes = 0;
  Check(cudaGetDevice(&device), "cudaGetDevice");
  Check(cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  const std::int32_t tokens = SharedTokens(args, most_bytes - kStaticBytes);
  const int bytes = tokens == 0 ? 0 : tokens / 8 + (args.out.capacity + 7) / 8 * 16;
  Check(cudaFuncSetAttribute(JoinKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "shared memory of JoinKernel");
  LaunchFollower("Join", JoinKernel, static_cast<unsigned>(n_heads), kThreads, bytes, stream, args,
                 tokens);
}

}  // namespace fathom::cuda
