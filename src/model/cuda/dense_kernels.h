// SPDX-License-Identifier: MIT
// Kernels of the dense part beside the matrices. Every pointer is device memory, borrowed until the
// stream is done, aligned to 16 bytes unless said otherwise; matrices are row-major without gaps.
// Launches allocate nothing, wait for nothing, and do nothing for n = 0; they can be captured.
// Throw what CUDA reports of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fathom::cuda {

using Bf16 = std::uint16_t;  // the upper half of an IEEE single

// x[i] = table[tokens[i]]. Tokens must be in the table.
struct EmbedArgs {
  const Bf16* table;           // [n_vocab][width]
  const std::int32_t* tokens;  // [n]
  float* x;                    // [n][width] out
  std::int32_t n;
  std::int32_t width;  // a multiple of 8
};
void LaunchEmbed(const EmbedArgs& args, cudaStream_t stream);

// s = x + (delta + delta_bias), out = bf16(s / sqrt(mean(s^2) + eps) * weight), row by row.
struct NormArgs {
  const float* x;           // [n][width]
  const float* delta;       // [n][width] or null
  const float* delta_bias;  // [width] or null; only with delta
  const float* weight;      // [width]
  float* sum;               // [n][width] out: s; may be x; null: not written
  Bf16* out;                // [n][width] out
  std::int32_t n;
  std::int32_t width;  // a multiple of 8, at most 32768
  float eps;
};
void LaunchNorm(const NormArgs& args, cudaStream_t stream);  // norm_kernels.cu

// Cosine and sine of every position and rotated pair, as ggml_rope_ext computes them: the angle of
// pair i + 1 is that of pair i times theta_scale, in single precision; YaRN mixes in between.
struct AnglesArgs {
  const std::int32_t* positions;  // [n] >= 0; aligned to 4 bytes
  const float* factors;           // [n_pairs] or null
  float2* angles;                 // [n][n_pairs] out: cos, sin, times magnitude
  std::int32_t n;
  std::int32_t n_pairs;  // rotated channels of a head / 2
  float theta_scale;
  float freq_scale;
  float ext_factor;  // 0: no YaRN
  float corr_low;    // pairs below turn at their own speed, those above corr_high at freq_scale
  float corr_high;
  float magnitude;
};
void LaunchAngles(const AnglesArgs& args, cudaStream_t stream);

// Splits the product with the fused matrix into heads: adds the bias, normalises queries and keys
// (q_norm and k_norm given), and rotates them. Channels beyond 2 n_pairs pass through unrotated.
struct QkvArgs {
  const float* qkv;      // [n][n_heads + 2 n_kv_heads][head_dim]
  const float* bias;     // [n_heads + 2 n_kv_heads][head_dim] or null
  const float* q_norm;   // [head_dim] or null
  const float* k_norm;   // [head_dim] or null
  const float2* angles;  // [n][n_pairs]
  float* q;              // [n][n_heads][head_dim] out
  float* k;              // [n][n_kv_heads][head_dim] out
  float* v;              // [n][n_kv_heads][head_dim] out
  std::int32_t n;
  std::int32_t n_heads;
  std::int32_t n_kv_heads;
  std::int32_t head_dim;  // even, at most 256
  std::int32_t n_pairs;
  bool neox;  // a pair is (i, i + n_pairs), else (2i, 2i + 1)
  float eps;
};
void LaunchQkv(const QkvArgs& args, cudaStream_t stream);  // norm_kernels.cu

// out = bf16(silu(gate + bias) * (up + bias)).
struct SwigluArgs {
  const float* gate_up;  // [n][2][width]
  const float* bias;     // [2][width] or null
  Bf16* out;             // [n][width] out
  std::int32_t n;
  std::int32_t width;  // a multiple of 8
};
void LaunchSwiglu(const SwigluArgs& args, cudaStream_t stream);

struct ConvertArgs {
  const float* x;  // [n]
  Bf16* out;       // [n] out, rounded to nearest even
  std::int64_t n;  // a multiple of 8
};
void LaunchConvert(const ConvertArgs& args, cudaStream_t stream);

// x[i] += bias, row by row. Both aligned to 4 bytes.
struct BiasArgs {
  const float* bias;  // [width]
  float* x;           // [n][width]
  std::int32_t n;
  std::int32_t width;
};
void LaunchBias(const BiasArgs& args, cudaStream_t stream);

// The place of the largest number of each row; among equal ones the smallest, NaN loses. A row of
// NaN gives 0. Aligned to 4 bytes.
struct ArgmaxArgs {
  const float* x;        // [n][width]
  std::int32_t* places;  // [n] out
  std::int32_t n;
  std::int32_t width;  // > 0
};
void LaunchArgmax(const ArgmaxArgs& args, cudaStream_t stream);

// y = x w^T in single precision, for very few rows of x. Its time is that of reading w.
struct GemvArgs {
  const Bf16* w;   // [out][in]
  const Bf16* x;   // [n][in]
  float* y;        // [n][out] out
  std::int32_t n;  // 0 .. kMostGemvRows
  std::int32_t out;
  std::int32_t in;  // a multiple of 8
};
inline constexpr std::int32_t kMostGemvRows = 4;
void LaunchGemv(const GemvArgs& args, cudaStream_t stream);  // gemv.cu

// Normally distributed numbers; number i depends on seed and i alone.
struct RandomBf16Args {
  Bf16* out;  // [n] out
  std::int64_t n;
  std::uint64_t seed;
  float deviation;
};
void LaunchRandomBf16(const RandomBf16Args& args, cudaStream_t stream);
struct RandomFloatArgs {
  float* out;  // [n]
  std::int64_t n;
  std::uint64_t seed;
  float middle;
  float deviation;
};
void LaunchRandomFloat(const RandomFloatArgs& args, cudaStream_t stream);

}  // namespace fathom::cuda
