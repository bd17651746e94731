// SPDX-License-Identifier: MIT
// The SIMD vocabulary of kernels_impl.h in the vector extensions of GCC and Clang: 128 bits, which
// every 64-bit machine has. Included once, inside the anonymous namespace of kernels_portable.cc.
// The comments here define the words for all three files.

constexpr int kLanes = 4;             // of F32 and I32
constexpr int kLanes16 = 8;           // of I16
constexpr int kScanAccumulators = 8;  // vectors the scans keep in registers
constexpr int kByteLanes = 16;        // of Bytes
constexpr int kTileRows = 4;          // micro-tile of prefill: rows ..
constexpr int kTileVectors = 2;       // .. and vectors; kLanes * kTileVectors divides 64
constexpr int kAttendVectors = 2;     // vectors of a value row kept for four heads

typedef float F32 __attribute__((vector_size(16)));
typedef std::int32_t I32 __attribute__((vector_size(16)));
typedef std::uint32_t U32 __attribute__((vector_size(16)));
typedef std::int16_t I16 __attribute__((vector_size(16)));
typedef std::uint16_t U16x4 __attribute__((vector_size(8)));
typedef std::int16_t I16x4 __attribute__((vector_size(8)));
typedef std::uint8_t U8x8 __attribute__((vector_size(8)));
typedef std::uint8_t Bytes __attribute__((vector_size(16)));
using Mask16 = I16;  // all bits of a lane set or clear
using Mask32 = I32;

FATHOM_INLINE F32 Zero() { return F32{}; }
FATHOM_INLINE F32 Set(float x) { return F32{x, x, x, x}; }
FATHOM_INLINE F32 Load(const float* p) {
  F32 x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
FATHOM_INLINE void Store(float* p, F32 x) { __builtin_memcpy(p, &x, sizeof x); }
FATHOM_INLINE F32 Add(F32 a, F32 b) { return a + b; }
FATHOM_INLINE F32 Sub(F32 a, F32 b) { return a - b; }
FATHOM_INLINE F32 Mul(F32 a, F32 b) { return a * b; }
FATHOM_INLINE F32 Div(F32 a, F32 b) { return a / b; }
// a * b + c; one rounding where the instruction set has it.
FATHOM_INLINE F32 MulAdd(F32 a, F32 b, F32 c) { return a * b + c; }
// a * b + c rounded once to single precision, whatever the instruction set: for a difference of
// large numbers. Slow here, where it goes through double.
FATHOM_INLINE F32 FusedMulAdd(F32 a, F32 b, F32 c) {
  typedef double F64 __attribute__((vector_size(32)));
  const F64 product = __builtin_convertvector(a, F64) * __builtin_convertvector(b, F64);  // exact
  return __builtin_convertvector(product + __builtin_convertvector(c, F64), F32);
}
FATHOM_INLINE F32 Choose(I32 mask, F32 a, F32 b) {
  return (F32)((mask & (I32)a) | (~mask & (I32)b));
}
FATHOM_INLINE F32 Abs(F32 x) { return (F32)((I32)x & 0x7FFFFFFF); }
// The second operand where either is NaN.
FATHOM_INLINE F32 MaxOrSecond(F32 a, F32 b) { return Choose(a > b, a, b); }
FATHOM_INLINE F32 MinOrSecond(F32 a, F32 b) { return Choose(a < b, a, b); }
// To the nearest integer, ties to even; |x| < 2^22.
FATHOM_INLINE F32 Round(F32 x) { return (x + 12582912.0f) - 12582912.0f; }
// |x| < 2^31, no NaN.
FATHOM_INLINE I32 FloorToInt(F32 x) {
  const I32 toward_zero = __builtin_convertvector(x, I32);
  return toward_zero + (__builtin_convertvector(toward_zero, F32) > x);  // a true lane is -1
}
// x, but 0 where the condition is 0 (a NaN condition keeps x).
FATHOM_INLINE F32 ZeroUnlessNonZero(F32 condition, F32 x) {
  return (F32)((condition != Zero()) & (I32)x);
}
// x, but 0 where condition < limit (a NaN condition keeps x).
FATHOM_INLINE F32 ZeroBelow(F32 condition, F32 limit, F32 x) {
  return (F32)(~(condition < limit) & (I32)x);
}
// x * 2^exponent for integers -126 .. 127; NaN stays NaN.
FATHOM_INLINE F32 ScaleByPowerOf2(F32 x, F32 exponent) {
  const F32 in_range = Choose(exponent == exponent, exponent, Zero());
  return x * (F32)((__builtin_convertvector(in_range, I32) + 127) << 23);
}
// Lanes 0 .. n - 1 of x, the others of fill.
FATHOM_INLINE F32 FirstLanes(F32 x, int n, F32 fill) {
  return Choose((I32{0, 1, 2, 3}) < (I32{n, n, n, n}), x, fill);
}
// kLanes halves. Scaling by 2^112 rebuilds the exponent and makes subnormals normal.
FATHOM_INLINE F32 LoadHalf(const Half* p) {
  U16x4 raw;
  __builtin_memcpy(&raw, p, sizeof raw);
  const U32 h = __builtin_convertvector(raw, U32);
  const F32 magnitude = (F32)((h & 0x7FFFu) << 13) * 0x1p112f;
  const U32 special = (U32)((h & 0x7C00u) == 0x7C00u) & 0x7F800000u;  // inf and NaN
  return (F32)((U32)magnitude | special | ((h & 0x8000u) << 16));
}

FATHOM_INLINE float ReduceAdd(F32 x) { return (x[0] + x[2]) + (x[1] + x[3]); }
FATHOM_INLINE float ReduceMax(F32 x) {
  const float a = x[0] > x[2] ? x[0] : x[2];
  const float b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}
FATHOM_INLINE F32 UnpackLow(F32 a, F32 b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
FATHOM_INLINE F32 UnpackHigh(F32 a, F32 b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
FATHOM_INLINE F32 LowPairs(F32 a, F32 b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
FATHOM_INLINE F32 HighPairs(F32 a, F32 b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }
// Lane i: the sum of all lanes of v[i]; v: [kLanes].
FATHOM_INLINE F32 ReduceRows(const F32* v) {
  const F32 a = UnpackLow(v[0], v[1]) + UnpackHigh(v[0], v[1]);
  const F32 b = UnpackLow(v[2], v[3]) + UnpackHigh(v[2], v[3]);
  return LowPairs(a, b) + HighPairs(a, b);
}
// In place; v: [kLanes].
FATHOM_INLINE void Transpose(F32* v) {
  const F32 a = UnpackLow(v[0], v[1]);
  const F32 b = UnpackLow(v[2], v[3]);
  const F32 c = UnpackHigh(v[0], v[1]);
  const F32 d = UnpackHigh(v[2], v[3]);
  v[0] = LowPairs(a, b);
  v[1] = HighPairs(a, b);
  v[2] = LowPairs(c, d);
  v[3] = HighPairs(c, d);
}

FATHOM_INLINE I32 SetInt(std::int32_t x) { return I32{x, x, x, x}; }
FATHOM_INLINE I32 LoadInt(const std::int32_t* p) {
  I32 x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
FATHOM_INLINE void StoreInt(std::int32_t* p, I32 x) { __builtin_memcpy(p, &x, sizeof x); }
FATHOM_INLINE I32 AddInt(I32 a, I32 b) { return (I32)((U32)a + (U32)b); }  // modulo 2^32
// Bit `Plane` of a non-negative code, as 0 or 1.
template <int Plane>
FATHOM_INLINE I32 BitOf(I32 code) {
  return (code >> Plane) & 1;
}
// count + 1 where x >= limit.
FATHOM_INLINE I32 CountAtLeast(I32 count, I32 x, I32 limit) { return count - (x >= limit); }
FATHOM_INLINE I32 MaxInt(I32 a, I32 b) {
  const I32 mask = a > b;
  return (mask & a) | (~mask & b);
}
FATHOM_INLINE std::int32_t ReduceAddInt(I32 x) { return x[0] + x[1] + x[2] + x[3]; }
FATHOM_INLINE std::int32_t ReduceMaxInt(I32 x) {
  const std::int32_t a = x[0] > x[1] ? x[0] : x[1];
  const std::int32_t b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
// Integers in the order of the scores: -0 equals +0, every NaN is the lowest.
FATHOM_INLINE I32 OrderKey(F32 x) {
  const I32 bits = (I32)(x + Zero());
  const I32 key = bits ^ ((bits >> 31) & 0x7FFFFFFF);
  const I32 number = x == x;
  return (number & key) | (~number & SetInt(INT32_MIN));
}
// Appends the lanes with key >= limit and their indices, index + lane; returns how many. May write
// kLanes elements whatever it returns.
FATHOM_INLINE int AppendAtLeast(I32 key, I32 limit, std::int32_t index, std::int32_t* indices,
                                std::int32_t* keys) {
  const I32 take = key >= limit;
  int n = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    indices[n] = index + lane;
    keys[n] = key[lane];
    n -= take[lane];
  }
  return n;
}

FATHOM_INLINE I16 Zero16() { return I16{}; }
// Every lane one of two equal 16-bit halves of the pair.
FATHOM_INLINE I16 SetPair16(std::int32_t pair) { return (I16)SetInt(pair); }
// kLanes16 bits, the lowest first.
FATHOM_INLINE Mask16 LoadMask16(const unsigned char* bits) {
  const std::int16_t b = *bits;
  const I16 lane = {1, 2, 4, 8, 16, 32, 64, 128};
  return ((I16{b, b, b, b, b, b, b, b}) & lane) == lane;
}
FATHOM_INLINE I16 MaskedAdd16(I16 sum, Mask16 mask, I16 x) { return sum + (mask & x); }
// (a + b + 1) / 2 of numbers 0 .. 255.
FATHOM_INLINE I16 Average16(I16 a, I16 b) { return (a + b + 1) >> 1; }
// kLanes16 numbers 0 .. 255 as bytes.
FATHOM_INLINE void StoreAsBytes16(std::uint8_t* p, I16 x) {
  const U8x8 bytes = __builtin_convertvector(x, U8x8);
  __builtin_memcpy(p, &bytes, sizeof bytes);
}
// Bits piece * kLanes .. of a plane word.
FATHOM_INLINE Mask32 LoadMask32(const unsigned char* word, int piece) {
  const I32 lane = {1, 2, 4, 8};
  return (SetInt(word[piece / 2] >> (piece % 2 * 4)) & lane) == lane;
}
FATHOM_INLINE F32 MaskedAdd(F32 sum, Mask32 mask, F32 x) { return sum + (F32)(mask & (I32)x); }
// kLanes signed bytes.
FATHOM_INLINE F32 LoadInt8(const std::uint8_t* p) {
  F32 x;
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<std::int8_t>(p[i]);
  return x;
}
// kLanes nibbles, the low half of a byte first, minus 8.
FATHOM_INLINE F32 LoadNibbles(const std::uint8_t* p) {
  F32 x;
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>((p[i / 2] >> (i % 2 * 4) & 15) - 8);
  return x;
}
// kLanes unsigned bytes.
FATHOM_INLINE F32 LoadByte(const std::uint8_t* p) {
  F32 x;
  for (int i = 0; i < kLanes; ++i) x[i] = p[i];
  return x;
}

FATHOM_INLINE I32 SubInt(I32 a, I32 b) { return (I32)((U32)a - (U32)b); }  // modulo 2^32
FATHOM_INLINE I32 ShiftRightInt(I32 x, int n) { return x >> n; }           // of signed numbers
FATHOM_INLINE I32 ShiftLeft7(I32 x) { return (I32)((U32)x << 7); }
FATHOM_INLINE I32 MinInt(I32 a, I32 b) {
  const I32 less = a < b;
  return (less & a) | (~less & b);
}
FATHOM_INLINE std::int32_t ReduceMinInt(I32 x) {
  const std::int32_t a = x[0] < x[2] ? x[0] : x[2];
  const std::int32_t b = x[1] < x[3] ? x[1] : x[3];
  return a < b ? a : b;
}
FATHOM_INLINE F32 IntToFloat(I32 x) { return __builtin_convertvector(x, F32); }
FATHOM_INLINE void StoreFirstInts(std::int32_t* p, I32 x, int n) {
  for (int i = 0; i < n && i < kLanes; ++i) p[i] = x[i];
}

// Bytes: kByteLanes unsigned bytes, in lanes of 16 where a word says lane.
FATHOM_INLINE Bytes LoadBytes(const void* p) {
  Bytes x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
FATHOM_INLINE void StoreBytes(void* p, Bytes x) { __builtin_memcpy(p, &x, sizeof x); }
FATHOM_INLINE Bytes SetByte(int x) { return Bytes{} + static_cast<std::uint8_t>(x); }
// 16 bytes in every lane.
FATHOM_INLINE Bytes LoadTable(const std::uint8_t* p) { return LoadBytes(p); }
// table[index] in each lane; index: 0 .. 15.
FATHOM_INLINE Bytes Lookup(Bytes table, Bytes index) {
  Bytes x{};
  for (int i = 0; i < kByteLanes; ++i) x[i] = table[index[i]];
  return x;
}
FATHOM_INLINE Bytes LowNibbles(Bytes x) { return x & 15; }
FATHOM_INLINE Bytes HighNibbles(Bytes x) { return x >> 4; }
// min(a + b, 255).
FATHOM_INLINE Bytes AddSaturated(Bytes a, Bytes b) {
  const Bytes sum = a + b;
  return sum | (Bytes)(sum < a);
}
// Bit i: whether bytes i are equal.
FATHOM_INLINE std::uint64_t EqualBits(Bytes a, Bytes b) {
  std::uint64_t bits = 0;
  for (int i = 0; i < kByteLanes; ++i) bits |= static_cast<std::uint64_t>(a[i] == b[i]) << i;
  return bits;
}
// acc + products a b of bytes 0 .. 128 and 0 .. 127, in any way that makes the lanes together the
// sum of all kByteLanes products.
FATHOM_INLINE I32 DotAdd(I32 acc, Bytes a, Bytes b) {
  for (int i = 0; i < kByteLanes; ++i) acc[i / 4] += a[i] * b[i];
  return acc;
}
FATHOM_INLINE void Prefetch(const void* p) { __builtin_prefetch(p); }
// To the second-level cache.
FATHOM_INLINE void PrefetchFar(const void* p) { __builtin_prefetch(p, 0, 2); }

// Bytes of labels: four to a lane of I32.
FATHOM_INLINE I32 LoadCodes(const void* p) {
  I32 x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <int Bits>
FATHOM_INLINE I32 ShiftBits(I32 x) {
  return (I32)((U32)x >> Bits);
}
// The low bits of every byte.
template <int Bits>
FATHOM_INLINE I32 LowBits(I32 x) {
  return x & (((1 << Bits) - 1) * 0x01010101);
}
// The operand whose bits are larger as an unsigned number: of numbers without a sign the larger,
// and NaN above all.
FATHOM_INLINE F32 MaxBits(F32 a, F32 b) { return Choose((U32)a > (U32)b, a, b); }
// To the nearest integer, ties to even; |x| < 2^22, any number for a NaN.
FATHOM_INLINE I32 RoundToInt(F32 x) { return __builtin_convertvector(Round(x), I32); }
// Lane i: the bytes v[0][i], v[1][i], v[2][i], v[3][i], of numbers -127 .. 127.
FATHOM_INLINE I32 PackBytes(const I32* v) {
  const U32 low = ((U32)v[0] & 0xFFu) | (((U32)v[1] & 0xFFu) << 8);
  return (I32)(low | (((U32)v[2] & 0xFFu) << 16) | ((U32)v[3] << 24));
}
// Dot products of four unsigned bytes, codes, with four signed ones, weights of -127 .. 127. At
// most kDotAdds sums of codes up to `Most` fit.
using Dot = I16;
template <int Most>
constexpr int kDotAdds = 32767 / (2 * 127 * Most);
FATHOM_INLINE Dot ZeroDot() { return Dot{}; }
FATHOM_INLINE Dot AddToDot(Dot sum, I32 codes, I32 weights) {
  typedef std::uint16_t U16 __attribute__((vector_size(16)));
  const I16 even = (I16)((U16)codes & 0xFF) * ((I16)((U16)weights << 8) >> 8);
  return sum + even + (I16)((U16)codes >> 8) * ((I16)weights >> 8);
}
FATHOM_INLINE I32 DotTotal(Dot sum) {
  return ((I32)((U32)(I32)sum << 16) >> 16) + ((I32)sum >> 16);
}
// out: [32 tokens][4 bytes] from four rows of layout::ChannelLabel, `at` bytes behind their starts;
// a byte holds the codes of two tokens 32 apart.
FATHOM_INLINE void InterleaveRows(const unsigned char* const* row, std::int64_t at,
                                  std::int32_t* out) {
  auto* bytes = reinterpret_cast<unsigned char*>(out);
  for (int r = 0; r < 32; ++r) {
    for (int k = 0; k < 4; ++k) bytes[4 * r + k] = row[k][at + r / 4 % 2 * 16 + r / 8 * 4 + r % 4];
  }
}
