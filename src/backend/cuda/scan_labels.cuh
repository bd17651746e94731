// SPDX-License-Identifier: MIT
// Parts of the label scan (scan_labels.cu): the ring of codes, the products of codes and weights,
// and the weights themselves. Functions are called by all lanes of a warp.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "backend/cuda/mma.cuh"
#include "backend/cuda/scan_labels.h"

namespace fathom::cuda::labels {

enum class Codes { kTokens4, kTokens2, kChannels4 };  // layout and bits

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kRingBytes = 8192;   // of a warp
constexpr int kChunkBytes = 1024;  // codes of a block in the channels of one chunk
constexpr int kQueueKeys = 512;    // candidates that a thread block collects, of all heads
constexpr int kNever = 1 << 29;    // a sum that is not reached: sums stay below 2^20
constexpr int kScaleRowBytes = 2 * kTileBlocks;

// Channels of a unit, which are those of a lane; four units are a chunk.
template <Codes kCodes>
constexpr int kUnit = kCodes == Codes::kTokens2 ? 16 : 8;

// kColumns: columns that a block needs, 4, 8 or 16 (two products of 8).
template <int kColumns>
struct Step {
  static constexpr int kBlocks = kColumns == 16 ? 1 : 2;
  static constexpr int kSets = kColumns == 4 ? 1 : 2;  // operands b, of 8 columns each
  static constexpr int kStageBytes = kBlocks * kChunkBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  // A step ends in two groups of sums: of both blocks, or of both sets.
  __device__ static constexpr int Block(int group) { return kColumns == 16 ? 0 : group; }
  __device__ static constexpr int Set(int group) { return kColumns == 4 ? 0 : group; }
  // Of column n of a set: its block in the step and its query head.
  __device__ static int ColumnBlock(int set, int n) {
    return kColumns == 4 ? n >> 2 : kColumns == 8 ? set : 0;
  }
  __device__ static int ColumnHead(int set, int n) {
    return kColumns == 4 ? n & 3 : kColumns == 8 ? n : n + 8 * set;
  }
};

// What the launch decides.
struct Shape {
  int parts;     // thread blocks to a piece
  int chunks;    // of channels, at least 1
  int channels;  // of all chunks
  int units;     // of a token (kTokens)
  int columns;
  float least_power;  // 2^t
  float scale_power;  // 2^-t
};

// Shared memory: scales [channel][16 blocks] with 16 bytes between units, so that the four units
// of a chunk lie in different banks; queries [column][channels + 4] for the same reason.
FATHOM_HD inline int ScaleOffset(int channel) {
  return channel * kScaleRowBytes + channel / 8 * 16;
}
struct Shared {
  unsigned char* ring;    // of the warp
  unsigned char* scales;  // of the warp
  std::uint64_t* queue;   // [column][kQueueKeys / columns]
  float* q;
  std::int32_t* rows;   // [channels]
  float* least;         // [column]
  std::int32_t* count;  // [column] candidates found, whether or not they fitted the queue

  __device__ Shared(unsigned char* base, const Shape& shape, int warp) {
    ring = base + warp * kRingBytes;
    base += kWarps * kRingBytes;
    scales = base + warp * ScaleOffset(shape.channels);
    base += kWarps * ScaleOffset(shape.channels);
    queue = reinterpret_cast<std::uint64_t*>(base);
    q = reinterpret_cast<float*>(queue + kQueueKeys);
    rows = reinterpret_cast<std::int32_t*>(q + shape.columns * (shape.channels + 4));
    least = reinterpret_cast<float*>(rows + shape.channels);
    count = reinterpret_cast<std::int32_t*>(least + kMaxGroup);
  }
};
inline int SharedBytes(const Shape& shape) {
  return kWarps * (kRingBytes + ScaleOffset(shape.channels)) + kQueueKeys * 8 +
         shape.columns * (shape.channels + 4) * 4 + shape.channels * 4 + kMaxGroup * 8;
}

// to: an address in shared memory.
__device__ inline void CopyAsync16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
__device__ inline unsigned SharedAddress(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ inline void EndStage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void WaitStage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  __syncwarp();
}

// NaN where either is.
__device__ inline float MaxNan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

// The ring of one warp and what is still to be asked for: stages are (step, chunk), chunk fastest.
template <Codes kCodes, int kColumns, bool kOneChunk>
class Reader {
  using S = Step<kColumns>;
  static constexpr bool kByChannel = kCodes == Codes::kChannels4;
  // Copies of a lane to a stage.
  static constexpr int kCopies = 2 * S::kBlocks;

 public:
  __device__ Reader(const LabelScan& s, const Shape& shape, const LabelPiece& piece,
                    const Shared& shared, int tile, int n_blocks, int lane)
      : ring_(shared.ring),
        to_(SharedAddress(shared.ring)),
        rows_(shared.rows),
        row_bytes_(static_cast<std::int64_t>(piece.row_blocks) * 32),
        units_(shape.units),
        n_channels_(s.n_channels),
        blocks_left_(n_blocks),
        chunks_(kOneChunk ? 1 : shape.chunks),
        lane_(lane) {
    const std::int64_t block_bytes = kByChannel ? 32 : shape.units * 256;
    codes_ = piece.codes + tile * kTileBlocks * block_bytes;
    if constexpr (kByChannel) {
      codes_ += lane % kCopies * 16;
      if constexpr (kOneChunk) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          row_[i] = Slot(i) < n_channels_ ? codes_ + rows_[Slot(i)] * row_bytes_ : nullptr;
        }
      }
    } else {
      const int unit = lane >> 4, q = lane & 15;
      codes_ += lane * 16;
      at_[0] = unit * 256 + (q ^ 2 * unit) * 16;
      at_[1] = (unit + 2) * 256 + (q ^ (2 * unit + 4)) * 16;
    }
  }

  // Asks for the next stage, if any; one group of copies either way.
  __device__ void Ask() {
    if (blocks_left_ > 0) {
      const unsigned stage = to_ + asked_;
      if constexpr (kByChannel) {
        AskChannels(stage);
      } else {
        AskTokens(stage);
      }
      asked_ = (asked_ + S::kStageBytes) & (kRingBytes - 1);
      if (kOneChunk || ++chunk_ == chunks_) {
        chunk_ = 0;
        blocks_left_ -= S::kBlocks;
        codes_ += S::kBlocks * (kByChannel ? 32 : units_ * 256);
      }
    }
    EndStage();
  }
  __device__ const unsigned char* Next() {
    const unsigned char* stage = ring_ + read_;
    read_ = (read_ + S::kStageBytes) & (kRingBytes - 1);
    return stage;
  }

 private:
  // [block][unit][64 tokens][4 bytes]; the 16 bytes of 4 tokens are exchanged with others of the
  // unit, differently in each unit, so that lanes of different units meet no bank twice.
  __device__ void AskTokens(unsigned stage) const {
    const int units = units_ - 4 * chunk_ - (lane_ >> 4);
    const std::uint8_t* from = codes_ + chunk_ * kChunkBytes;
#pragma unroll
    for (int j = 0; j < S::kBlocks; ++j) {
      if (j < blocks_left_) {
        if (units > 0) CopyAsync16(stage + at_[0] + j * kChunkBytes, from);
        if (units > 2) CopyAsync16(stage + at_[1] + j * kChunkBytes, from + 512);
      }
      from += units_ * 256;
    }
  }
  // [channel][block][32 bytes], where the low two bits of the index of 32 bytes are exchanged, by
  // unit, for the same reason.
  __device__ int Slot(int i) const { return i * (32 / kCopies) + lane_ / kCopies; }
  __device__ void AskChannels(unsigned stage) {
    const int part = lane_ % kCopies;
    const bool used = part / 2 < blocks_left_;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int slot = Slot(i), channel = 32 * chunk_ + slot;
      const unsigned to =
          stage + ((slot * S::kBlocks + part / 2) ^ (slot / 8)) * 32 + part % 2 * 16;
      if constexpr (kOneChunk) {
        if (used && row_[i] != nullptr) CopyAsync16(to, row_[i]);
        row_[i] += row_[i] != nullptr ? S::kBlocks * 32 : 0;
      } else {
        if (used && channel < n_channels_) CopyAsync16(to, codes_ + rows_[channel] * row_bytes_);
      }
    }
  }

  const unsigned char* ring_;
  unsigned to_;
  const std::int32_t* rows_;
  const std::uint8_t* codes_;         // what the lane reads next of the step
  const std::uint8_t* row_[kCopies];  // the same of a channel (kChannels, one chunk)
  int at_[2];                         // where it goes in a stage (kTokens)
  std::int64_t row_bytes_;
  int units_, n_channels_, blocks_left_, chunks_, lane_;
  int chunk_ = 0, asked_ = 0, read_ = 0;
};

// The lane's codes of one block of a stage: 8 words, of which word m holds unit k of token m of the
// lane, and word 4 + m that of the token 32 behind (kTokens); or, of token m and of that 32 behind,
// in low and high halves, four channels of the unit, and 4 + m the other four (kChannels).
template <Codes kCodes, int kColumns>
__device__ inline void LoadCodes(const unsigned char* stage, int block, int lane,
                                 std::uint32_t (&x)[8]) {
  const int g = lane >> 2, k = lane & 3;
  if constexpr (kCodes == Codes::kChannels4) {
    constexpr int kBlocks = Step<kColumns>::kBlocks;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = ((8 * k + i) * kBlocks + block) ^ k;
      x[i] = *reinterpret_cast<const std::uint32_t*>(stage + at * 32 + g * 4);
    }
    TransposeBytes(x[0], x[1], x[2], x[3]);
    TransposeBytes(x[4], x[5], x[6], x[7]);
  } else {
    const auto* at =
        reinterpret_cast<const uint4*>(stage + block * kChunkBytes + k * 256) + (g ^ 2 * k);
    const uint4 a = at[0], b = at[8];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
}

// First token in the block of the lane's four, which are followed by four others 32 behind.
template <Codes kCodes>
__device__ inline int LaneTokens(int lane) {
  const int g = lane >> 2;
  return kCodes == Codes::kChannels4 ? (g & 3) * 8 + (g >> 2) * 4 : g * 4;
}

// acc[4 m + 2 r + e]: token m + 32 r of the lane's, column 2 k + e. Starts from `from`, which may
// be acc's own or two numbers for the two columns.
template <Codes kCodes, bool kAdd>
__device__ inline void Multiply(const std::uint32_t (&x)[8], const std::uint32_t* b, int start0,
                                int start1, int (&acc)[16]) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    int c[4] = {start0, start1, start0, start1};
    if constexpr (kAdd) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] = acc[4 * m + i];
    }
    int d[4];
    const std::uint32_t lo = x[m], hi = x[4 + m];
    if constexpr (kCodes == Codes::kTokens2) {
      constexpr std::uint32_t kMask = 0x03030303u;
      const std::uint32_t first[4] = {lo & kMask, hi & kMask, lo >> 2 & kMask, hi >> 2 & kMask};
      const std::uint32_t second[4] = {lo >> 4 & kMask, hi >> 4 & kMask, lo >> 6 & kMask,
                                       hi >> 6 & kMask};
      int half[4];
      MmaU8S8(half, first, make_uint2(b[0], b[1]), c);
      MmaU8S8(d, second, make_uint2(b[2], b[3]), half);
    } else {
      constexpr std::uint32_t kMask = 0x0F0F0F0Fu;
      constexpr bool kTokens = kCodes == Codes::kTokens4;
      const std::uint32_t a[4] = {lo & kMask, (kTokens ? hi : lo >> 4) & kMask,
                                  (kTokens ? lo >> 4 : hi) & kMask, hi >> 4 & kMask};
      MmaU8S8(d, a, make_uint2(b[0], b[1]), c);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[4 * m + i] = d[i];
  }
}

// What the four lanes of a column know of it.
struct Column {
  float steps;  // 127 / m, or 0
  float unit;   // score = (2 sum - (2^t - 1) all) * unit: half of the scale of Backend
  int all;      // sum of weights; of the lane's channels until Finish
  int limit;    // sums below it cannot reach `least`
  int offset;   // score = (2 (sum - limit) + offset) * unit
};

// m: of the lane's channels.
__device__ inline void Scale(float m, float scale_power, Column* c) {
  m = MaxNan(m, __shfl_xor_sync(kAll, m, 1));
  m = MaxNan(m, __shfl_xor_sync(kAll, m, 2));
  const bool any = m >= 0x1p-100f && m < INFINITY;
  c->steps = any ? __fdiv_rn(127.0f, m) : 0.0f;
  // m / 127 rounded right: the reciprocal of 127 is off by 2^-28 of itself, hence the first
  // quotient by less than its last place, and the remainder of such a one is exact.
  constexpr float kReciprocal = 1.0f / 127;
  const float quotient = __fmul_rn(m, kReciprocal);
  const float rest = __fmaf_rn(-127.0f, quotient, m);
  const float scale = __fmul_rn(__fmaf_rn(rest, kReciprocal, quotient), scale_power);
  c->unit = any ? scale : m < 0x1p-100f ? 0.0f : NAN;
  c->all = 0;
}

// p: products of the lane's channels. Adding 1.5 * 2^23 rounds to the nearest integer, ties to
// even, and leaves it in the low bits.
template <int kLane>
__device__ inline void Weigh(const float (&p)[kLane], Column* c, std::uint32_t* b) {
#pragma unroll
  for (int i = 0; i < kLane; i += 4) {
    std::uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[j] = __float_as_uint(__fadd_rn(__fmul_rn(p[i + j], c->steps), 12582912.0f));
    }
    const std::uint32_t quad =
        __byte_perm(__byte_perm(w[0], w[1], 0x0040), __byte_perm(w[2], w[3], 0x0040), 0x5410);
    c->all = __dp4a(static_cast<int>(quad), 0x01010101, c->all);
    b[i / 4] = quad;
  }
}

// After all channels. A score RN(T unit) >= least needs T >= least / unit but for rounding, for
// which 2^-20 is taken off: five roundings are far less. |T| < 2^22. A NaN as `least` is that of a
// column without a head.
__device__ inline void Finish(float least, int centre, float least_power, Column* c) {
  c->all += __shfl_xor_sync(kAll, c->all, 1);
  c->all += __shfl_xor_sync(kAll, c->all, 2);
  float t = __fmul_rn(least, __fmul_rn(c->steps, least_power));
  t = fminf(fmaxf(t, -0x1p22f), 0x1p22f);  // 0 * inf: all are compared
  const int total = __float2int_rd(__fsub_rn(t, __fmaf_rn(fabsf(t), 0x1p-20f, 1.0f)));
  const bool possible = c->unit == c->unit && least == least;
  c->limit = possible ? (total + centre * c->all + 1) >> 1 : kNever;
  c->offset = 2 * c->limit - centre * c->all;
}

// One of 16 registers, by number: an index would put them into memory.
__device__ inline int Pick(const int (&v)[16], int i) {
  int a[8], b[4];
#pragma unroll
  for (int j = 0; j < 8; ++j) a[j] = i & 8 ? v[8 + j] : v[j];
#pragma unroll
  for (int j = 0; j < 4; ++j) b[j] = i & 4 ? a[4 + j] : a[j];
  const int c0 = i & 2 ? b[2] : b[0], c1 = i & 2 ? b[3] : b[1];
  return i & 1 ? c1 : c0;
}

}  // namespace fathom::cuda::labels
