// Weights of 8 bits from floats: each row to the nearest codes of its full range.

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

// Rounds to the nearest number of a type and back.
INLINE float as_stored(float value, int32_t type) {
  alignas(64) float held[16];
  store_as(held, 0, type, splat(value));
  store(held, load_as_float(held, 0, type));
  return held[0];
}

// The scale of a row whose largest magnitude is ``highest``.
INLINE float scale_of(const Rounding& op, float highest) {
  const float exact = 2 * highest / 255;
  if (exact == 0) return 1;
  const float scale = as_stored(exact, op.storage);
  return scale < op.smallest ? op.smallest : scale;
}

void round_row(const Rounding& op, int64_t row) {
  const int64_t first = row * op.k;
  F highest = splat(0), not_finite = splat(0);
  for (int64_t i = 0; i < op.k; i += 16) {
    const F value = load_partial(op.x, first + i, op.x_type, op.k - i);
    highest = max(highest, abs(value));
    not_finite = not_finite + value * splat(0);
  }
  const float scale = scale_of(op, reduce_max(highest));
  op.scales[row] = scale + reduce_add(not_finite);
  const F by = splat(scale), middle = splat(128), top = splat(255);
  for (int64_t i = 0; i < op.k; i += 16) {
    const F value = load_partial(op.x, first + i, op.x_type, op.k - i);
    const F code = min(max(round_nearest(value / by) + middle, splat(0)), top);
    int8_t held[16];
    store_low_bytes(held, to_int(code));
    memcpy(op.codes + first + i, held, min(16, op.k - i));
  }
}

}  // namespace

void rounding(const Rounding& op, Worker& worker) {
  parallel_for(worker, op.m, chunk_size(worker, op.m, 64), [&](int64_t row) { round_row(op, row); });
}

}  // namespace ISA
}  // namespace aiakq
