// RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467) and layer norm of rows.
//
// Sums are accumulated in four float32 vectors, in the order of the columns. RMS norm rounds the normalized value to
// the type of the activations before multiplying by the weight, as in training.

#include <math.h>

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int SUMS = 4;

// Rounds to the type.
template <int TYPE> INLINE F round_to(F x) {
  if constexpr (TYPE == FLOAT32) return x;
  alignas(64) uint16_t held[16];
  store_as(held, 0, TYPE, x);
  return load_as_float(held, 0, TYPE);
}

// Returns the sum of (x - mean)^2, or of x if PLAIN.
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
    const F value = load_partial(x, i, TYPE, d - i);
    if constexpr (PLAIN) {
      sums[0] = sums[0] + value;
    } else {
      // Lanes past the end contribute 0.
      alignas(64) float ends[16];
      for (int lane = 0; lane < 16; lane++) ends[lane] = i + lane < d ? mean : 0;
      const F difference = value - load(ends);
      sums[0] = fma(difference, difference, sums[0]);
    }
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <int TYPE> void norm_row(const Norm& op, int64_t row) {
  const int64_t d = op.d, bytes = bytes_of(TYPE);
  void* x = (uint8_t*)op.x + row * op.x_stride * bytes;
  void* y = (uint8_t*)op.y + row * op.y_stride * bytes;
  if (op.residual) {
    const void* added = (const uint8_t*)op.residual + row * op.residual_stride * bytes;
    for (int64_t i = 0; i < d; i += 16)
      store_partial(x, i, TYPE, load_partial(x, i, TYPE, d - i) + load_partial(added, i, TYPE, d - i), d - i);
  }
  const float mean = op.centered ? sum_of<TYPE, true>(x, d, 0) / (float)d : 0;
  const F middle = splat(mean), scale = splat(1 / sqrtf(sum_of<TYPE, false>(x, d, mean) / (float)d + op.epsilon));
  int64_t i = 0;
  if (op.centered) {
    for (; i < d; i += 16) {
      F value = (load_partial(x, i, TYPE, d - i) - middle) * scale * load_partial(op.weight, i, FLOAT32, d - i);
      if (op.bias) value = value + load_partial(op.bias, i, FLOAT32, d - i);
      store_partial(y, i, TYPE, value, d - i);
    }
    return;
  }
  for (; i + 16 <= d; i += 16)
    store_as(y, i, TYPE, round_to<TYPE>(load_as_float(x, i, TYPE) * scale) * load(op.weight + i));
  if (i < d) {
    const F weight = load_partial(op.weight, i, FLOAT32, d - i);
    store_partial(y, i, TYPE, round_to<TYPE>(load_partial(x, i, TYPE, d - i) * scale) * weight, d - i);
  }
}

}  // namespace

void norm(const Norm& op, Worker& worker) {
  parallel_for(worker, op.m, chunk_size(worker, op.m, 16), [&](int64_t row) {
    if (op.x_type == FLOAT32) norm_row<FLOAT32>(op, row);
    if (op.x_type == FLOAT16) norm_row<FLOAT16>(op, row);
    if (op.x_type == BFLOAT16) norm_row<BFLOAT16>(op, row);
  });
}

}  // namespace ISA
}  // namespace aiakq
