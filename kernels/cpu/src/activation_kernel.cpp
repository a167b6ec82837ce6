// act(gate) * up, element by element, in float32 until it is written.

#include "elements.h"
#include "kernels.h"
#include "team.h"

namespace aiakq {
namespace ISA {
namespace {

// Columns that a thread takes at a time.
constexpr int64_t PIECE = 2048;

// x / (1 + e^-z). Past 80 what is left of the quotient is smaller than any float of use.
INLINE F logistic(F x, F z) {
  return x / (splat(1) + exponential(smaller(splat(0) - z, splat(80))));
}

template <int ACTIVATION> INLINE F activated(F x) {
  if constexpr (ACTIVATION == SILU) return logistic(x, x);
  if constexpr (ACTIVATION == RELU) return larger(splat(0), x);  // in this order NaN stays
  if constexpr (ACTIVATION == GELU_TANH) {
    // x (1 + tanh u) / 2 = x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
    return logistic(x, x * fma(x * x, splat(0.0713548163f), splat(1.5957691216f)));
  }
  // x times the part of a normal distribution below x: by Abramowitz and Stegun 7.1.26, error under 1.5e-7, the part
  // beyond |x| is  t (a1 + t (a2 + ...)) e^(-x^2 / 2) / 2  with t = 1 / (1 + p |x| / sqrt 2).
  const F size = magnitude(x);
  const F t = splat(1) / fma(size, splat(0.2316418882f), splat(1));
  F beyond = splat(0.5307027145f);
  beyond = fma(beyond, t, splat(-0.7265760135f));
  beyond = fma(beyond, t, splat(0.7107068705f));
  beyond = fma(beyond, t, splat(-0.142248368f));
  beyond = fma(beyond, t, splat(0.127414796f));
  beyond = beyond * t * exponential(splat(-0.5f) * x * x) * size;
  return larger(splat(0), x) - beyond;
}

template <int TYPE, int ACTIVATION>
INLINE void columns(const uint8_t* gate, const uint8_t* up, uint8_t* y, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; i += 16) {
    F value = activated<ACTIVATION>(load_some(gate, i, TYPE, to - i));
    if (up) value = value * load_some(up, i, TYPE, to - i);
    store_some(y, i, TYPE, value, to - i);
  }
}

template <int TYPE> void piece(const Gate& a, int64_t row, int64_t from, int64_t to) {
  const int64_t bytes = bytes_of(TYPE);
  const uint8_t* gate = (const uint8_t*)a.gate + row * a.gate_stride * bytes;
  const uint8_t* up = a.up ? (const uint8_t*)a.up + row * a.up_stride * bytes : nullptr;
  uint8_t* y = (uint8_t*)a.y + row * a.y_stride * bytes;
  switch (a.activation) {
    case SILU: return columns<TYPE, SILU>(gate, up, y, from, to);
    case GELU_TANH: return columns<TYPE, GELU_TANH>(gate, up, y, from, to);
    case GELU: return columns<TYPE, GELU>(gate, up, y, from, to);
    default: return columns<TYPE, RELU>(gate, up, y, from, to);
  }
}

}  // namespace

void gate(const void* op, Team& team) {
  const Gate& a = *(const Gate*)op;
  const int64_t across = pieces(a.columns, PIECE), count = a.op.m * across;
  share(team, count, chunk_of(team, count, 8), [&](int64_t at) {
    const int64_t row = at / across, from = at % across * PIECE, to = least(from + PIECE, a.columns);
    if (a.type == FLOAT32) piece<FLOAT32>(a, row, from, to);
    if (a.type == FLOAT16) piece<FLOAT16>(a, row, from, to);
    if (a.type == BFLOAT16) piece<BFLOAT16>(a, row, from, to);
  });
}

}  // namespace ISA
}  // namespace aiakq
