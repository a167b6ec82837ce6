// function(gate) * up, elementwise, computed in float32 and rounded once.

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

// Columns per work item.
constexpr int64_t COLUMNS = 2048;
// The factor in quick_gelu(x) = x / (1 + e^(-1.702 x)), and the clamping bound of gpt-oss.
constexpr float QUICK = 1.702f, CLAMP = 7.0f;

template <int FUNCTION> INLINE F apply(F x) {
  if constexpr (FUNCTION == SILU) return logistic(x, x);
  if constexpr (FUNCTION == RELU) return max(splat(0), x);  // this operand order propagates NaN
  if constexpr (FUNCTION == RELU2) {
    const F positive = max(splat(0), x);
    return positive * positive;
  }
  if constexpr (FUNCTION == SIGMOID) return sigmoid(x);
  if constexpr (FUNCTION == QUICK_GELU) return logistic(x, x * splat(QUICK));
  if constexpr (FUNCTION == CLAMPED_SWIGLU) {
    const F gate = min(splat(CLAMP), x);
    return logistic(gate, gate * splat(QUICK));
  }
  if constexpr (FUNCTION == GELU_TANH) {
    // x (1 + tanh u) / 2 = x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
    return logistic(x, x * fma(x * x, splat(0.0713548163f), splat(1.5957691216f)));
  }
  // x times the normal distribution function of x. By Abramowitz and Stegun 7.1.26, with an error under 1.5e-7, its
  // tail beyond |x| is t (a1 + t (a2 + ...)) e^(-x^2 / 2) / 2 with t = 1 / (1 + p |x| / sqrt 2).
  const F magnitude = abs(x);
  const F t = splat(1) / fma(magnitude, splat(0.2316418882f), splat(1));
  F tail = splat(0.5307027145f);
  tail = fma(tail, t, splat(-0.7265760135f));
  tail = fma(tail, t, splat(0.7107068705f));
  tail = fma(tail, t, splat(-0.142248368f));
  tail = fma(tail, t, splat(0.127414796f));
  tail = tail * t * exponential(splat(-0.5f) * x * x) * magnitude;
  return max(splat(0), x) - tail;
}

template <int TYPE, int FUNCTION>
INLINE void apply_to(const uint8_t* gate, const uint8_t* up, uint8_t* y, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; i += 16) {
    F value = apply<FUNCTION>(load_partial(gate, i, TYPE, to - i));
    if (up) {
      F other = load_partial(up, i, TYPE, to - i);
      if constexpr (FUNCTION == CLAMPED_SWIGLU)
        other = max(splat(-CLAMP), min(splat(CLAMP), other)) + splat(1);
      value = value * other;
    }
    store_partial(y, i, TYPE, value, to - i);
  }
}

template <int TYPE> void apply_to_row(const Activation& op, int64_t row, int64_t from, int64_t to) {
  const int64_t bytes = bytes_of(TYPE);
  const uint8_t* gate = (const uint8_t*)op.gate + row * op.gate_stride * bytes;
  const uint8_t* up = op.up ? (const uint8_t*)op.up + row * op.up_stride * bytes : nullptr;
  uint8_t* y = (uint8_t*)op.y + row * op.y_stride * bytes;
  switch (op.function) {
    case SILU: return apply_to<TYPE, SILU>(gate, up, y, from, to);
    case GELU_TANH: return apply_to<TYPE, GELU_TANH>(gate, up, y, from, to);
    case GELU: return apply_to<TYPE, GELU>(gate, up, y, from, to);
    case RELU2: return apply_to<TYPE, RELU2>(gate, up, y, from, to);
    case QUICK_GELU: return apply_to<TYPE, QUICK_GELU>(gate, up, y, from, to);
    case SIGMOID: return apply_to<TYPE, SIGMOID>(gate, up, y, from, to);
    case CLAMPED_SWIGLU: return apply_to<TYPE, CLAMPED_SWIGLU>(gate, up, y, from, to);
    default: return apply_to<TYPE, RELU>(gate, up, y, from, to);
  }
}

}  // namespace

void activation(const Activation& op, Worker& worker) {
  const int64_t across = ceil_div(op.columns, COLUMNS), count = op.m * across;
  parallel_for(worker, count, chunk_size(worker, count, 8), [&](int64_t item) {
    const int64_t row = item / across, from = item % across * COLUMNS, to = min(from + COLUMNS, op.columns);
    if (op.type == FLOAT32) apply_to_row<FLOAT32>(op, row, from, to);
    if (op.type == FLOAT16) apply_to_row<FLOAT16>(op, row, from, to);
    if (op.type == BFLOAT16) apply_to_row<BFLOAT16>(op, row, from, to);
  });
}

}  // namespace ISA
}  // namespace aiakq
