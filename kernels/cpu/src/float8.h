// 8-bit floats (Micikevicius et al. 2022, arXiv:2209.05433): codes of weights to floats, floats rounded to e4m3.

#pragma once

#include "elements.h"

namespace aiakq {
namespace ISA {

constexpr float LARGEST_E4M3 = 448;

// Converts byte i of every lane, the bits of a finite e4m3 or e5m2, to a float: its exponent and fraction are moved to
// their places in a float, whose exponent is then too small by the difference of the biases. Numbers below the smallest
// normal e4m3 are such floats, too.
template <int MATH, int i> INLINE F float8_as_float(I four) {
  static_assert(MATH == E4M3 || MATH == E5M2);
  const I high = shift_left<24 - 8 * i>(four);
  if constexpr (MATH == E4M3)
    return bits_as_float(shift_right_signed<4>(high) & isplat((int32_t)0x87f00000)) * splat(0x1p120f);
  else
    return bits_as_float(shift_right_signed<3>(high) & isplat((int32_t)0x8fe00000)) * splat(0x1p112f);
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
