// Rows divided by their root mean square, or brought to mean 0 and deviation 1.
//
// Sums are float32 in sixteen lanes of four sums each, in the order of the columns. The normalized value is rounded to
// the type of the activations before the weight multiplies it, as the models were trained.

#include <math.h>

#include "elements.h"
#include "kernels.h"
#include "team.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int SUMS = 4;

// Sixteen values as the type holds them.
template <int TYPE> INLINE F rounded(F x) {
  if constexpr (TYPE == FLOAT32) return x;
  alignas(64) uint16_t held[16];
  store_as(held, 0, TYPE, x);
  return load_as_float(held, 0, TYPE);
}

// The sum of (x - mean)^2, or of x if ``plain``.
template <int TYPE, bool PLAIN> INLINE float sum_of(const void* x, int64_t d, float mean) {
  F sums[SUMS];
  UNROLL for (int s = 0; s < SUMS; s++) sums[s] = splat(0);
  const F middle = splat(mean);
  int64_t i = 0;
  for (; i + 16 * SUMS <= d; i += 16 * SUMS)
    UNROLL for (int s = 0; s < SUMS; s++) {
      const F value = load_as_float(x, i + 16 * s, TYPE);
      if constexpr (PLAIN) sums[s] = sums[s] + value;
      else sums[s] = fma(value - middle, value - middle, sums[s]);
    }
  for (; i < d; i += 16) {
    const F value = load_some(x, i, TYPE, d - i);
    if constexpr (PLAIN) {
      sums[0] = sums[0] + value;
    } else {
      // The lanes past the end are 0 and must stay so.
      alignas(64) float ends[16];
      for (int lane = 0; lane < 16; lane++) ends[lane] = i + lane < d ? mean : 0;
      const F apart = value - load(ends);
      sums[0] = fma(apart, apart, sums[0]);
    }
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <int TYPE> void row(const Norm& a, int64_t at) {
  const int64_t d = a.d, bytes = bytes_of(TYPE);
  void* x = (uint8_t*)a.x + at * a.x_stride * bytes;
  void* y = (uint8_t*)a.y + at * a.y_stride * bytes;
  if (a.residual) {
    const void* added = (const uint8_t*)a.residual + at * a.residual_stride * bytes;
    for (int64_t i = 0; i < d; i += 16)
      store_some(x, i, TYPE, load_some(x, i, TYPE, d - i) + load_some(added, i, TYPE, d - i), d - i);
  }
  const float mean = a.centered ? sum_of<TYPE, true>(x, d, 0) / (float)d : 0;
  const F middle = splat(mean), scale = splat(1 / sqrtf(sum_of<TYPE, false>(x, d, mean) / (float)d + a.epsilon));
  int64_t i = 0;
  if (a.centered) {
    for (; i < d; i += 16) {
      F value = (load_some(x, i, TYPE, d - i) - middle) * scale * load_some(a.weight, i, FLOAT32, d - i);
      if (a.bias) value = value + load_some(a.bias, i, FLOAT32, d - i);
      store_some(y, i, TYPE, value, d - i);
    }
    return;
  }
  for (; i + 16 <= d; i += 16)
    store_as(y, i, TYPE, rounded<TYPE>(load_as_float(x, i, TYPE) * scale) * load(a.weight + i));
  if (i < d) {
    const F weight = load_some(a.weight, i, FLOAT32, d - i);
    store_some(y, i, TYPE, rounded<TYPE>(load_some(x, i, TYPE, d - i) * scale) * weight, d - i);
  }
}

}  // namespace

void norm(const void* op, Team& team) {
  const Norm& a = *(const Norm*)op;
  share(team, a.op.m, chunk_of(team, a.op.m, 16), [&](int64_t at) {
    if (a.x_type == FLOAT32) row<FLOAT32>(a, at);
    if (a.x_type == FLOAT16) row<FLOAT16>(a, at);
    if (a.x_type == BFLOAT16) row<BFLOAT16>(a, at);
  });
}

}  // namespace ISA
}  // namespace aiakq
