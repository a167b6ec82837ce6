// 8-bit floats (Micikevicius et al. 2022, arXiv:2209.05433): codes of weights to floats, floats rounded to e4m3.

#pragma once

#include "elements.h"

namespace aiakq {
namespace ISA {

constexpr float LARGEST_E4M3 = 448;

constexpr bool is_float8(int32_t math) { return math == E4M3 || math == E5M2; }

// By what divided_float8 divides: the difference of the biases of exponents.
constexpr float float8_factor(int32_t math) { return math == E4M3 ? 0x1p120f : 0x1p112f; }

// Converts byte i of every lane, the bits of a finite e4m3 or e5m2, to a float: its exponent and fraction are moved to
// their places in a float, whose exponent is then too small by the difference of the biases. Numbers below the smallest
// normal e4m3 are such floats, too. Two bytes are moved at once, as the upper halves of floats.
template <int MATH, int i> INLINE F divided_float8(I four) {
  static_assert(is_float8(MATH));
  const I high = i % 2 ? four : shift_left<8>(four);
  const I two = MATH == E4M3 ? shift_halves_right_signed<4>(high) & isplat((int32_t)0x87f087f0)
                             : shift_halves_right_signed<3>(high) & isplat((int32_t)0x8fe08fe0);
  return bits_as_float(i < 2 ? shift_left<16>(two) : two & isplat((int32_t)0xffff0000));
}

// The largest power of two up to ``value``, which is not negative, at least 2^-126 and at most 2^126.
INLINE float power_of_two(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t exponent = bits >> 23;
  bits = (exponent < 1 ? 1 : exponent > 253 ? 253 : exponent) << 23;
  memcpy(&value, &bits, 4);
  return value;
}

// The nearest e4m3 of |x| <= 448, ties to even: adding and subtracting 1.5 * 2^23 times the distance between neighbors.
INLINE F round_to_e4m3(F x) {
  const F power = max(bits_as_float(bits_as_int(x) & isplat(0x7f800000)), splat(0x1p-6f));
  const F shift = power * splat(1.5f * 0x1p20f);
  return (x + shift) - shift;
}

// The scale of inputs whose largest magnitude is ``highest``.
INLINE float scale_of_e4m3(const Linear& op, float highest) {
  float scale = (highest < op.bound ? highest : op.bound) / LARGEST_E4M3;
  if (scale < op.min_scale) scale = op.min_scale;
  if (op.powers_of_two) {
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    bits = (bits + 0x7fffff) & 0x7f800000;
    memcpy(&scale, &bits, 4);
  }
  return scale == 0 ? 1 : scale;
}

// Writes row ``row`` of x [M, K], rounded to e4m3 times a scale, to ``to`` [K]. A value that is not finite makes those
// that share its scale NaN.
INLINE void round_row_to_e4m3(const Linear& op, int64_t row, float* to) {
  const int64_t start = row * op.x_stride;
  const F low = splat(-LARGEST_E4M3), high = splat(LARGEST_E4M3);
  for (int64_t first = 0; first < op.k; first += op.rounded) {
    const int64_t end = min((int64_t)op.k, first + op.rounded);
    F highest = splat(0), not_finite = splat(0);
    for (int64_t i = first; i < end; i += 16) {
      const F x = load_partial(op.x, start + i, op.x_type, end - i);
      highest = max(highest, abs(x));
      not_finite = not_finite + x * splat(0);
    }
    const F poison = splat(reduce_add(not_finite));
    const F scale = splat(op.input_scale ? *op.input_scale : scale_of_e4m3(op, reduce_max(highest)));
    for (int64_t i = first; i < end; i += 16) {
      const F x = load_partial(op.x, start + i, op.x_type, end - i);
      store_partial(to, i, FLOAT32, round_to_e4m3(min(max(x / scale, low), high)) * scale + poison, end - i);
    }
  }
}

}  // namespace ISA
}  // namespace aiakq
