// SPDX-License-Identifier: MIT
#include "base/half.h"

#include "base/cpu_features.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fathom {
namespace {

#if defined(__x86_64__)
// Returns how many leading values were converted, a multiple of 8.
__attribute__((target("avx,f16c"))) std::int64_t WidenF16c(const Half* in, std::int64_t n,
                                                           float* out) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
  return i;
}

__attribute__((target("avx,f16c"))) std::int64_t NarrowF16c(const float* in, std::int64_t n,
                                                            Half* out) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
  return i;
}
#endif

}  // namespace

void ConvertHalfToFloat(const Half* in, std::int64_t n, float* out) {
  std::int64_t i = 0;
#if defined(__x86_64__)
  if (GetCpuFeatures().f16c) i = WidenF16c(in, n, out);
#endif
  for (; i < n; ++i) out[i] = HalfToFloat(in[i]);
}

void ConvertFloatToHalf(const float* in, std::int64_t n, Half* out) {
  std::int64_t i = 0;
#if defined(__x86_64__)
  if (GetCpuFeatures().f16c) i = NarrowF16c(in, n, out);
#endif
  for (; i < n; ++i) out[i] = FloatToHalf(in[i]);
}

}  // namespace fathom
