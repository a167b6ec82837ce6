// Vectors of sixteen 32-bit lanes: one 512-bit register, two 256-bit registers, or a compiler vector type (portable
// version and Arm).
//
// Every file that includes this header is compiled once per instruction set, whose name is the macro ISA. Everything is
// in a namespace of that name, so that the linker never merges functions of different versions; for the same reason
// such files use no templates of the C++ standard library.

#pragma once

#include <cstdint>
#include <cstring>

#include "common.h"

#ifndef ISA
#error "compile with -DISA=portable, avx2, avx512 or vnni"
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Without VNNI no instruction multiplies and accumulates bytes exactly: bytes are widened and multiplied as 16-bit
// pairs.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#define PAIRS 1
#else
#define PAIRS 0
#endif

namespace aiakq {
namespace ISA {

using aiakq::max;
using aiakq::min;

#if defined(__AVX512F__)

struct F { __m512 v; };   // 16 floats
struct I { __m512i v; };  // 16 integers, or 64 bytes

INLINE F splat(float x) { return {_mm512_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE F fnma(F a, F b, F c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
INLINE F round_nearest(F a) { return {_mm512_roundscale_ps(a.v, 0x08)}; }
// Bit i: a >= b in lane i; false if either is NaN.
INLINE uint32_t ge_mask(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// x where a >= b, else 0.
INLINE F select_ge(F a, F b, F x) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), x.v)}; }
// a in the lanes whose bit is set, b in the others.
INLINE F select_bits(uint32_t bits, F a, F b) { return {_mm512_mask_mov_ps(b.v, (__mmask16)bits, a.v)}; }
INLINE float reduce_add(F a) { return _mm512_reduce_add_ps(a.v); }
INLINE float reduce_max(F a) { return _mm512_reduce_max_ps(a.v); }

INLINE I isplat(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE I iload(const void* p) { return {_mm512_loadu_si512(p)}; }
INLINE void istore(void* p, I x) { _mm512_storeu_si512(p, x.v); }
INLINE I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
INLINE I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
INLINE I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
INLINE I operator|(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
INLINE I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int S> INLINE I shift_right(I a) { return {_mm512_srli_epi32(a.v, S)}; }
template <int S> INLINE I shift_right_signed(I a) { return {_mm512_srai_epi32(a.v, S)}; }
template <int S> INLINE I shift_left(I a) { return {_mm512_slli_epi32(a.v, S)}; }
template <int S> INLINE I shift_halves_right_signed(I a) { return {_mm512_srai_epi16(a.v, S)}; }
INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
INLINE I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
INLINE F bits_as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
INLINE I bits_as_int(F a) { return {_mm512_castps_si512(a.v)}; }

INLINE F load_bytes(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
INLINE F load_signed_bytes(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
INLINE F load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
INLINE F load_bf16(const uint16_t* p) {
  return bits_as_float({_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16)});
}
INLINE void store_low_halves(uint16_t* p, I x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x.v)); }
INLINE void store_low_bytes(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x.v)); }
INLINE void store_half(uint16_t* p, F x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}

// A table of 16 bytes, and the bytes of it whose numbers are the bytes of ``indices``, 0 to 15.
INLINE I load_byte_table(const uint8_t* p) { return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))}; }
INLINE I look_up(I table, I indices) { return {_mm512_shuffle_epi8(table.v, indices.v)}; }

// The bytes of x and y by turns: of the first eight of each 16, and of the others.
INLINE I interleave_low(I x, I y) { return {_mm512_unpacklo_epi8(x.v, y.v)}; }
INLINE I interleave_high(I x, I y) { return {_mm512_unpackhi_epi8(x.v, y.v)}; }

// A table of 16 floats, at ``p`` as floats and then as bytes [4, 16]; and in w[i] those whose numbers, 0 to 15, are bytes
// 4 i to 4 i + 3 of each four lanes.
struct FloatTable { __m512 v; };
INLINE FloatTable load_float_table(const uint8_t* p) { return {_mm512_loadu_ps(p)}; }
INLINE void look_up(const FloatTable& table, I indices, F (&w)[4]) {
  UNROLL for (int i = 0; i < 4; i++) {
    const __m128i bytes = _mm_set_epi32(4 * i + 3, 4 * i + 2, 4 * i + 1, 4 * i);
    const __m128i others = _mm_set1_epi32((int)0x80808000);  // become 0
    const __m512i lanes = _mm512_shuffle_epi8(indices.v, _mm512_broadcast_i32x4(_mm_or_si128(bytes, others)));
    w[i] = {_mm512_permutexvar_ps(lanes, table.v)};
  }
}

// The even and the odd bytes of every lane as 16-bit integers; acc + the two products of such pairs in each lane.
INLINE I even(I w) { return w & isplat(0x00ff00ff); }
INLINE I odd(I w) { return {_mm512_srli_epi16(w.v, 8)}; }
#if defined(__AVX512VNNI__)
INLINE I dot2(I acc, I w, I x) { return {_mm512_dpwssd_epi32(acc.v, w.v, x.v)}; }
#else
INLINE I dot2(I acc, I w, I x) { return acc + I{_mm512_madd_epi16(w.v, x.v)}; }
#endif

// dot4: acc + the four products of unsigned bytes of w and signed bytes of x in each lane. Without VNNI there is PAIRS
// instead: the instruction that multiplies bytes saturates.
// dot4_u4: the same for bytes of w up to 15 and of x from -127 to 127, at most eight times in a row. acc may then hold
// sums of pairs in 16 bits, up to 8 * 2 * 15 * 127, which sum_pairs adds up.
#if defined(__AVX512VNNI__)
INLINE I dot4(I acc, I w, I x) { return {_mm512_dpbusd_epi32(acc.v, w.v, x.v)}; }
INLINE I dot4_u4(I acc, I w, I x) { return dot4(acc, w, x); }
INLINE I sum_pairs(I acc) { return acc; }
#else
INLINE I dot4_u4(I acc, I w, I x) { return {_mm512_add_epi16(acc.v, _mm512_maddubs_epi16(w.v, x.v))}; }
INLINE I sum_pairs(I acc) { return {_mm512_madd_epi16(acc.v, _mm512_set1_epi16(1))}; }
#endif

#elif defined(__AVX2__)

struct F { __m256 a, b; };
struct I { __m256i a, b; };

INLINE F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F fnma(F x, F y, F z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F abs(F x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
INLINE F round_nearest(F x) { return {_mm256_round_ps(x.a, 0x08), _mm256_round_ps(x.b, 0x08)}; }
INLINE uint32_t ge_mask(F x, F y) {
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)) |
         (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)) << 8;
}
INLINE F select_ge(F x, F y, F z) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), z.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ), z.b)};
}
INLINE __m256 lanes_of_bits(uint32_t bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), lane), lane));
}
INLINE F select_bits(uint32_t bits, F x, F y) {
  return {_mm256_blendv_ps(y.a, x.a, lanes_of_bits(bits)), _mm256_blendv_ps(y.b, x.b, lanes_of_bits(bits >> 8))};
}
INLINE float reduce_add(F x) {
  float lanes[16], half[8];
  store(lanes, x);
  for (int i = 0; i < 8; i++) half[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; i++) half[i] += half[i + 4];
  return (half[0] + half[2]) + (half[1] + half[3]);
}
INLINE float reduce_max(F x) {
  float lanes[16];
  store(lanes, x);
  float best = lanes[0];
  for (int i = 1; i < 16; i++) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

INLINE I isplat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE I iload(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
INLINE void istore(void* p, I x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
INLINE I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I operator&(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
INLINE I operator|(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
INLINE I operator^(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int S> INLINE I shift_right(I x) { return {_mm256_srli_epi32(x.a, S), _mm256_srli_epi32(x.b, S)}; }
template <int S> INLINE I shift_right_signed(I x) { return {_mm256_srai_epi32(x.a, S), _mm256_srai_epi32(x.b, S)}; }
template <int S> INLINE I shift_left(I x) { return {_mm256_slli_epi32(x.a, S), _mm256_slli_epi32(x.b, S)}; }
template <int S> INLINE I shift_halves_right_signed(I x) {
  return {_mm256_srai_epi16(x.a, S), _mm256_srai_epi16(x.b, S)};
}
INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE F bits_as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
INLINE I bits_as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }

INLINE F load_bytes(const uint8_t* p) {
  __m128i all = _mm_loadu_si128((const __m128i*)p);
  return to_float({_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))});
}
INLINE F load_signed_bytes(const int8_t* p) {
  __m128i all = _mm_loadu_si128((const __m128i*)p);
  return to_float({_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))});
}
INLINE F load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
INLINE F load_bf16(const uint16_t* p) {
  __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + 1));
  return bits_as_float({_mm256_slli_epi32(a, 16), _mm256_slli_epi32(b, 16)});
}
INLINE void store_low_halves(uint16_t* p, I x) {
  int32_t lanes[16];
  istore(lanes, x);
  for (int i = 0; i < 16; i++) p[i] = (uint16_t)lanes[i];
}
INLINE void store_low_bytes(int8_t* p, I x) {
  const __m256i low = _mm256_set1_epi32(0xff);
  const __m256i halves = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  const __m256i bytes = _mm256_packus_epi16(halves, halves);  // four of x.a, four of x.b, in each 128 bits
  _mm_storeu_si128((__m128i*)p,
                   _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}
INLINE void store_half(uint16_t* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

INLINE I load_byte_table(const uint8_t* p) {
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return {bytes, bytes};
}
INLINE I look_up(I table, I indices) {
  return {_mm256_shuffle_epi8(table.a, indices.a), _mm256_shuffle_epi8(table.b, indices.b)};
}

INLINE I interleave_low(I x, I y) { return {_mm256_unpacklo_epi8(x.a, y.a), _mm256_unpacklo_epi8(x.b, y.b)}; }
INLINE I interleave_high(I x, I y) { return {_mm256_unpackhi_epi8(x.a, y.a), _mm256_unpackhi_epi8(x.b, y.b)}; }

// Each byte of the floats has its own table.
struct FloatTable { __m256i bytes[4]; };
INLINE FloatTable load_float_table(const uint8_t* p) {
  FloatTable table;
  for (int i = 0; i < 4; i++) table.bytes[i] = load_byte_table(p + 64 + 16 * i).a;
  return table;
}
INLINE void look_up(const FloatTable& table, __m256i indices, __m256 (&w)[4]) {
  const __m256i first = _mm256_shuffle_epi8(table.bytes[0], indices);
  const __m256i second = _mm256_shuffle_epi8(table.bytes[1], indices);
  const __m256i third = _mm256_shuffle_epi8(table.bytes[2], indices);
  const __m256i fourth = _mm256_shuffle_epi8(table.bytes[3], indices);
  const __m256i low = _mm256_unpacklo_epi8(first, second), low_upper = _mm256_unpacklo_epi8(third, fourth);
  const __m256i high = _mm256_unpackhi_epi8(first, second), high_upper = _mm256_unpackhi_epi8(third, fourth);
  w[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low, low_upper));
  w[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low, low_upper));
  w[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(high, high_upper));
  w[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(high, high_upper));
}
INLINE void look_up(const FloatTable& table, I indices, F (&w)[4]) {
  __m256 a[4], b[4];
  look_up(table, indices.a, a);
  look_up(table, indices.b, b);
  UNROLL for (int i = 0; i < 4; i++) w[i] = {a[i], b[i]};
}

INLINE I even(I w) { return w & isplat(0x00ff00ff); }
INLINE I odd(I w) { return {_mm256_srli_epi16(w.a, 8), _mm256_srli_epi16(w.b, 8)}; }
INLINE I dot2(I acc, I w, I x) { return acc + I{_mm256_madd_epi16(w.a, x.a), _mm256_madd_epi16(w.b, x.b)}; }
INLINE I dot4_u4(I acc, I w, I x) {
  return {_mm256_add_epi16(acc.a, _mm256_maddubs_epi16(w.a, x.a)),
          _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(w.b, x.b))};
}
INLINE I sum_pairs(I acc) {
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(acc.a, one), _mm256_madd_epi16(acc.b, one)};
}

#else

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
struct F { Floats v; };
struct I { Ints v; };

#define EACH for (int i = 0; i < 16; i++)
#define MAKE(T, expression) \
  T r;                      \
  EACH r.v[i] = expression; \
  return r
INLINE F splat(float x) { return {Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}}; }
INLINE F load(const float* p) {
  F r;
  memcpy(&r.v, p, 64);
  return r;
}
INLINE void store(float* p, F x) { memcpy(p, &x.v, 64); }
INLINE F operator+(F a, F b) { return {a.v + b.v}; }
INLINE F operator-(F a, F b) { return {a.v - b.v}; }
INLINE F operator*(F a, F b) { return {a.v * b.v}; }
INLINE F operator/(F a, F b) { return {a.v / b.v}; }
INLINE F fma(F a, F b, F c) { return {a.v * b.v + c.v}; }
INLINE F fnma(F a, F b, F c) { return {c.v - a.v * b.v}; }
// Returns the second operand if either is NaN, like the vector instructions.
INLINE F max(F a, F b) { return {a.v > b.v ? a.v : b.v}; }
INLINE F min(F a, F b) { return {a.v < b.v ? a.v : b.v}; }
INLINE F abs(F a) { return {(Floats)((Words)a.v & 0x7fffffffu)}; }
INLINE F round_nearest(F a) { MAKE(F, __builtin_rintf(a.v[i])); }
INLINE uint32_t ge_mask(F a, F b) {
  uint32_t bits = 0;
  EACH bits |= (uint32_t)(a.v[i] >= b.v[i]) << i;
  return bits;
}
INLINE F select_ge(F a, F b, F x) { return {(Floats)((Ints)x.v & (Ints)(a.v >= b.v))}; }
INLINE F select_bits(uint32_t bits, F a, F b) {
  const Ints lane = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  const Ints all = (Ints)(((int32_t)bits & lane) == lane);
  return {(Floats)(((Ints)a.v & all) | ((Ints)b.v & ~all))};
}
INLINE float reduce_add(F a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
  return a.v[0];
}
INLINE float reduce_max(F a) {
  float best = a.v[0];
  EACH best = a.v[i] > best ? a.v[i] : best;
  return best;
}
INLINE I isplat(int32_t x) { return {Ints{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}}; }
INLINE I iload(const void* p) {
  I r;
  memcpy(&r.v, p, 64);
  return r;
}
INLINE void istore(void* p, I x) { memcpy(p, &x.v, 64); }
INLINE I operator+(I a, I b) { return {(Ints)((Words)a.v + (Words)b.v)}; }
INLINE I operator-(I a, I b) { return {(Ints)((Words)a.v - (Words)b.v)}; }
INLINE I operator&(I a, I b) { return {a.v & b.v}; }
INLINE I operator|(I a, I b) { return {a.v | b.v}; }
INLINE I operator^(I a, I b) { return {a.v ^ b.v}; }
template <int S> INLINE I shift_right(I a) { return {(Ints)((Words)a.v >> S)}; }
template <int S> INLINE I shift_right_signed(I a) { return {a.v >> S}; }
template <int S> INLINE I shift_left(I a) { return {(Ints)((Words)a.v << S)}; }
template <int S> INLINE I shift_halves_right_signed(I a) {
  const Ints low = (Ints)((Words)a.v << 16) >> (16 + S), high = a.v >> (16 + S);
  return {(low & 0xffff) | (Ints)((Words)high << 16)};
}
INLINE F to_float(I a) { return {__builtin_convertvector(a.v, Floats)}; }
// Out-of-range values and NaN become the smallest integer, like the vector instructions.
INLINE I to_int(F a) {
  I r;
  EACH {
    const float rounded = __builtin_rintf(a.v[i]);
    r.v[i] = rounded >= -0x1p31f && rounded < 0x1p31f ? (int32_t)rounded : INT32_MIN;
  }
  return r;
}
INLINE F bits_as_float(I a) { return {(Floats)a.v}; }
INLINE I bits_as_int(F a) { return {(Ints)a.v}; }
INLINE F load_bytes(const uint8_t* p) { MAKE(F, (float)p[i]); }
INLINE F load_signed_bytes(const int8_t* p) { MAKE(F, (float)p[i]); }
INLINE float half_as_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits;
  if (rest >= 0x7c00) {
    bits = 0x7f800000 | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    bits = (rest << 13) + ((127 - 15) << 23);
  } else {
    float small = (float)rest * 0x1p-24f;
    memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
INLINE uint16_t float_as_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00;
  if (bits < 0x38800000) {  // below the smallest normal half: one addition rounds where the half ends
    float size;
    memcpy(&size, &bits, 4);
    size += 0.5f;
    memcpy(&bits, &size, 4);
    return sign | (uint16_t)(bits - 0x3f000000);
  }
  bits += 0xfff + (bits >> 13 & 1) - ((127 - 15) << 23);
  return sign | (uint16_t)(bits >> 13);
}
INLINE F load_half(const uint16_t* p) { MAKE(F, half_as_float(p[i])); }
INLINE F load_bf16(const uint16_t* p) {
  I r;
  EACH r.v[i] = (int32_t)((uint32_t)p[i] << 16);
  return bits_as_float(r);
}
INLINE void store_low_halves(uint16_t* p, I x) { EACH p[i] = (uint16_t)x.v[i]; }
INLINE void store_low_bytes(int8_t* p, I x) { EACH p[i] = (int8_t)x.v[i]; }
INLINE void store_half(uint16_t* p, F x) { EACH p[i] = float_as_half(x.v[i]); }
INLINE I load_byte_table(const uint8_t* p) {
  I r;
  for (int i = 0; i < 4; i++) memcpy((uint8_t*)&r.v + 16 * i, p, 16);
  return r;
}
INLINE I look_up(I table, I indices) {
  uint8_t from[64], at[64];
  memcpy(from, &table.v, 64);
  memcpy(at, &indices.v, 64);
  for (int i = 0; i < 64; i++) at[i] = from[at[i]];
  return iload(at);
}
template <int FIRST> INLINE I interleave(I x, I y) {
  uint8_t first[64], second[64], both[64];
  memcpy(first, &x.v, 64);
  memcpy(second, &y.v, 64);
  for (int i = 0; i < 64; i++) both[i] = (i % 2 ? second : first)[i / 16 * 16 + FIRST + i % 16 / 2];
  return iload(both);
}
INLINE I interleave_low(I x, I y) { return interleave<0>(x, y); }
INLINE I interleave_high(I x, I y) { return interleave<8>(x, y); }
struct FloatTable { float values[16]; };
INLINE FloatTable load_float_table(const uint8_t* p) {
  FloatTable table;
  memcpy(table.values, p, 64);
  return table;
}
INLINE void look_up(const FloatTable& table, I indices, F (&w)[4]) {
  uint8_t at[64];
  memcpy(at, &indices.v, 64);
  for (int i = 0; i < 64; i++) w[i / 4 % 4].v[i / 16 * 4 + i % 4] = table.values[at[i]];
}
// Sums wrap around like the vector instructions, which signed integers must not.
INLINE I dot4(I acc, I w, I x) {
  const Words u = (Words)w.v;
  const Ints s = x.v;
  Words total = (Words)acc.v + (Words)((Ints)(u & 255u) * ((Ints)((Words)s << 24) >> 24));
  total += (Words)((Ints)(u >> 8 & 255u) * ((Ints)((Words)s << 16) >> 24));
  total += (Words)((Ints)(u >> 16 & 255u) * ((Ints)((Words)s << 8) >> 24));
  return {(Ints)(total + (Words)((Ints)(u >> 24) * (s >> 24)))};
}
INLINE I dot4_u4(I acc, I w, I x) { return dot4(acc, w, x); }
INLINE I dot2(I acc, I w, I x) {
  const Words low = (Words)(((Ints)((Words)w.v << 16) >> 16) * ((Ints)((Words)x.v << 16) >> 16));
  return {(Ints)((Words)acc.v + low + (Words)((w.v >> 16) * (x.v >> 16)))};
}
INLINE I sum_pairs(I acc) { return acc; }
#undef MAKE
#undef EACH

#endif

// --- for every instruction set ---------------------------------------------------------------------------------------

// A table of 16 integers of 16 bits, at ``p`` their lower and then their upper bytes; and those whose numbers are bytes 0
// to 7 of each 16 of ``indices``, and bytes 8 to 15.
struct WordTable { I low, high; };
INLINE WordTable load_word_table(const uint8_t* p) { return {load_byte_table(p), load_byte_table(p + 16)}; }
INLINE void look_up(const WordTable& table, I indices, I& first, I& second) {
  const I low = look_up(table.low, indices), high = look_up(table.high, indices);
  first = interleave_low(low, high);
  second = interleave_high(low, high);
}

// Converts byte i of every lane to a float minus 128, exactly.
template <int i> INLINE F byte_minus_128(I x) {
#if defined(__AVX512F__)
  // Place the byte in the mantissa of 2^23 and subtract 2^23 + 128: one instruction less than a sign extension.
  const __m512i byte = _mm512_srli_epi32(x.v, 8 * i);
  const __m512i number = _mm512_ternarylogic_epi32(byte, _mm512_set1_epi32(0xff), _mm512_set1_epi32(0x4b000000), 0xea);
  return F{_mm512_castsi512_ps(number)} - splat(8388608.0f + 128.0f);
#else
  return to_float(shift_right_signed<24>(shift_left<24 - 8 * i>(x ^ isplat((int32_t)0x80808080))));
#endif
}

// bfloat16, rounded to nearest, ties to even; NaN stays NaN.
INLINE void store_bf16(uint16_t* p, F x) {
  I bits = bits_as_int(x);
  store_low_halves(p, shift_right<16>(bits + isplat(0x7fff) + (shift_right<16>(bits) & isplat(1))));
}

// e^x for x <= 88, 0 below -87.3; relative error under 2e-7. By 2^n * 2^f with a polynomial for |f| <= 1/2.
INLINE F exponential(F x) {
  x = max(x, splat(-87.33654f));
  F n = round_nearest(x * splat(1.44269504f));
  F f = fnma(n, splat(0.693359375f), x);
  f = fnma(n, splat(-2.12194440e-4f), f);
  F y = splat(1.9875691500e-4f);
  y = fma(y, f, splat(1.3981999507e-3f));
  y = fma(y, f, splat(8.3334519073e-3f));
  y = fma(y, f, splat(4.1665795894e-2f));
  y = fma(y, f, splat(1.6666665459e-1f));
  y = fma(y, f, splat(5.0000001201e-1f));
  y = fma(y, f * f, f + splat(1.0f));
  return y * bits_as_float(shift_left<23>(to_int(n) + isplat(127)));
}

// log(1 + e^x) = max(x, 0) + 2 artanh(e / (2 + e)) with e = e^-|x|, whose series converges like 9^-n.
INLINE F softplus(F x) {
  const F small = exponential(splat(0) - abs(x));
  const F s = small / (small + splat(2)), square = s * s;
  F sum = splat(2.0f / 15);
  for (int n = 13; n > 0; n -= 2) sum = fma(sum, square, splat(2.0f / (float)n));
  return fma(sum, s, max(x, splat(0)));
}

// x / (1 + e^-z). Beyond 80 the exponential would overflow, and the quotient is negligible.
INLINE F logistic(F x, F z) {
  return x / (splat(1) + exponential(min(splat(0) - z, splat(80))));
}

// 1 / (1 + e^-x). The exponential drops NaN; the difference restores it.
INLINE F sigmoid(F x) {
  const F bounded = max(splat(-80), min(splat(80), x));
  return logistic(splat(1), bounded) + (bounded - bounded);
}

}  // namespace ISA
}  // namespace aiakq
