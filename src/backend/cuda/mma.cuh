// SPDX-License-Identifier: MIT
// Small device functions that several kernels share.
#pragma once

#include <cstdint>

#include "backend/cuda/lists.h"

namespace fathom::cuda {

// d = a * b + c, 16 x 8 x 32, a unsigned bytes, b signed bytes. Lane 4g + t holds of a rows g and
// g + 8, columns 4t .. 4t + 3 and 16 + 4t ..; of b column g, the same rows; of c and d rows g and
// g + 8, columns 2t and 2t + 1.
__device__ inline void MmaU8S8(int (&d)[4], const std::uint32_t (&a)[4], uint2 b,
                               const int (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}
__device__ inline void MmaS8S8(int (&d)[4], const std::uint32_t (&a)[4], uint2 b,
                               const int (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}

// Bytes j of four words side by side, for j = 0 .. 3: the words are a 4 x 4 matrix of bytes, and
// this transposes it in place.
__device__ inline void TransposeBytes(std::uint32_t& w0, std::uint32_t& w1, std::uint32_t& w2,
                                      std::uint32_t& w3) {
  const std::uint32_t a = __byte_perm(w0, w1, 0x5140), b = __byte_perm(w0, w1, 0x7362);
  const std::uint32_t c = __byte_perm(w2, w3, 0x5140), d = __byte_perm(w2, w3, 0x7362);
  w0 = __byte_perm(a, c, 0x5410);
  w1 = __byte_perm(a, c, 0x7632);
  w2 = __byte_perm(b, d, 0x5410);
  w3 = __byte_perm(b, d, 0x7632);
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Appends a token to a list of candidates; counts it even where there is no room.
__device__ inline void AddCandidate(const Candidates& c, std::int64_t list, float score,
                                    std::int32_t token) {
  const std::int32_t at = atomicAdd(c.count + list, 1);
  if (at < c.capacity) c.keys[list * c.capacity + at] = CandidateKey(score, token);
}

}  // namespace fathom::cuda
