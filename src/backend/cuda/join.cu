// SPDX-License-Identifier: MIT
// The union of a group's winners, sorted by marking them in a bitmap. One CTA per head; the bitmap
// is its own, so that a barrier orders its phases.
#include <cstdint>

#include "backend/cuda/check.h"
#include "backend/cuda/radix.cuh"
#include "backend/cuda/select.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = kRadixThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kAhead = 4;  // loads of the bitmap in flight

struct Head {
  std::uint32_t* bitmap;
  std::uint16_t* masks;
};

__device__ inline void Mark(const Head& head, std::int32_t token, std::uint32_t attended_by) {
  atomicOr(head.bitmap + (token >> 5), 1u << (token & 31));
  // Atomics take 32 bits: the masks of an even token and the next one.
  atomicOr(reinterpret_cast<std::uint32_t*>(head.masks) + (token >> 1),
           attended_by << ((token & 1) * 16));
}

__device__ inline void MarkAll(const JoinWinners& a, std::int32_t index, const Lengths& lengths,
                               const Head& head) {
  const auto tid = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t per_list = lengths.keep * a.expand;
  const std::int32_t* winners = a.winners + static_cast<std::int64_t>(index) * a.group * a.max_keep;
  for (std::int32_t h = 0; h < a.group; ++h, winners += a.max_keep) {
    for (std::int32_t i = tid; i < per_list; i += kThreads) {
      const std::int32_t winner = a.expand == 1 ? i : i / a.expand;
      const std::int32_t token = winners[winner] * a.expand + (i - winner * a.expand);
      if (token < lengths.n_tokens) Mark(head, token, 1u << h);
    }
  }
  const std::uint32_t everyone = (1u << a.group) - 1;
  const std::int32_t behind = max(lengths.n_tokens - lengths.last, 0);
  const std::int32_t before = min(lengths.first, lengths.n_tokens);
  for (std::int32_t i = tid; i < before + behind; i += kThreads) {
    Mark(head, i < before ? i : lengths.last + (i - before), everyone);
  }
}

__device__ inline std::uint32_t Bits(const uint4& v) {
  return static_cast<std::uint32_t>(__popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w));
}

// Of a warp's part [begin, end) of the bitmap; all lanes get the sum.
__device__ inline std::uint32_t CountBits(const uint4* bitmap, std::int32_t begin,
                                          std::int32_t end) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  std::uint32_t count = 0;
  for (std::int32_t base = begin + lane; base < end; base += 32 * kAhead) {
    uint4 v[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const std::int32_t at = base + 32 * u;
      v[u] = at < end ? __ldcg(bitmap + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) count += Bits(v[u]);
  }
  return __reduce_add_sync(kAllLanes, count);
}

// Where a warp's tokens go.
struct Writer {
  std::int32_t* tokens;
  std::uint16_t* masks;  // of the head, to clear what does not fit
  std::int32_t capacity;

  __device__ void Word(std::uint32_t bits, std::int32_t first, std::uint32_t* place) const {
    for (; bits != 0; bits &= bits - 1, ++*place) {
      const std::int32_t token = first + __ffs(static_cast<int>(bits)) - 1;
      if (*place < static_cast<std::uint32_t>(capacity)) {
        tokens[*place] = token;
      } else {
        masks[token] = 0;
      }
    }
  }
};

// Lists the tokens of a warp's part from `place` on and clears it.
__device__ inline void List(uint4* bitmap, std::int32_t begin, std::int32_t end,
                            std::uint32_t place, const Writer& out) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  for (std::int32_t base = begin; base < end; base += 32 * kAhead) {
    uint4 v[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const std::int32_t at = base + 32 * u + lane;
      v[u] = at < end ? __ldcg(bitmap + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const std::uint32_t own = Bits(v[u]);
      if (!__any_sync(kAllLanes, own != 0)) continue;
      const std::uint32_t up_to = InclusiveWarpSum(own);
      if (own != 0) {
        const std::int32_t at = base + 32 * u + lane;
        std::uint32_t mine = place + up_to - own;
        out.Word(v[u].x, at * 128, &mine);
        out.Word(v[u].y, at * 128 + 32, &mine);
        out.Word(v[u].z, at * 128 + 64, &mine);
        out.Word(v[u].w, at * 128 + 96, &mine);
        bitmap[at] = make_uint4(0, 0, 0, 0);
      }
      place += __shfl_sync(kAllLanes, up_to, 31);
    }
  }
}

__global__ __launch_bounds__(kThreads) void JoinKernel(const JoinWinners a) {
  __shared__ std::uint32_t warp_count[kWarps];
  const auto index = static_cast<std::int32_t>(blockIdx.x);
  const auto tid = static_cast<std::int32_t>(threadIdx.x);
  const Lengths lengths = a.lengths[index / a.n_kv_heads];
  if (lengths.keep == 0) {
    if (tid == 0) a.out.count[index] = -1;
    return;
  }
  const Head head{a.bitmap + index * a.words_per_head, a.masks + index * a.max_tokens};
  MarkAll(a, index, lengths, head);
  __syncthreads();

  auto* bitmap = reinterpret_cast<uint4*>(head.bitmap);
  const std::int32_t n4 = (lengths.n_tokens + 127) / 128;
  const std::int32_t per_warp = (n4 + kWarps * 32 - 1) / (kWarps * 32) * 32;
  const std::int32_t warp = tid / 32;
  const std::int32_t begin = min(warp * per_warp, n4);
  const std::int32_t end = min(begin + per_warp, n4);
  const std::uint32_t own = CountBits(bitmap, begin, end);
  if (tid % 32 == 0) warp_count[warp] = own;
  __syncthreads();
  const std::uint32_t up_to = InclusiveWarpSum(warp_count[tid % 32]);
  const std::uint32_t place = __shfl_sync(kAllLanes, up_to, warp) - own;
  const auto total = static_cast<std::int32_t>(__shfl_sync(kAllLanes, up_to, 31));
  std::int32_t* tokens = a.out.tokens + static_cast<std::int64_t>(index) * a.out.capacity;
  List(bitmap, begin, end, place, {tokens, head.masks, a.out.capacity});
  __syncthreads();

  const std::int32_t n = min(total, a.out.capacity);
  std::uint16_t* mask = a.out.mask + static_cast<std::int64_t>(index) * a.out.capacity;
  for (std::int32_t i = tid; i < n; i += kThreads) {
    const std::int32_t token = tokens[i];
    mask[i] = __ldcg(head.masks + token);
    head.masks[token] = 0;
  }
  if (tid == 0) a.out.count[index] = n;
}

}  // namespace

void Join(const JoinWinners& args, cudaStream_t stream) {
  const std::int32_t n_heads = args.n_lists / args.group;
  if (n_heads == 0) return;
  JoinKernel<<<static_cast<unsigned>(n_heads), kThreads, 0, stream>>>(args);
  CheckLaunch("Join");
}

}  // namespace fathom::cuda
