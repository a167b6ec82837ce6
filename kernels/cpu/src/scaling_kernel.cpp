// softcap(scale * factor * x) + added, elementwise, computed in float32 and rounded once.

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

// Columns per work item.
constexpr int64_t COLUMNS = 2048;

// cap * tanh(x / cap), with tanh(u / 2) = (1 - e^-u) / (1 + e^-u). This order of the bounds propagates NaN; the
// exponential drops it, and the last term restores it.
INLINE F softcap(F x, float cap) {
  const F u = max(splat(-80), min(splat(80), x * splat(2 / cap)));
  const F decay = exponential(splat(0) - u);
  return splat(cap) * ((splat(1) - decay) / (splat(1) + decay)) + (u - u);
}

template <int TYPE> void scale_row(const Scaling& op, int64_t row, int64_t from, int64_t to) {
  const int64_t bytes = bytes_of(TYPE);
  const uint8_t* x = (const uint8_t*)op.x + row * op.x_stride * bytes;
  const uint8_t* added = op.added ? (const uint8_t*)op.added + row * op.added_stride * bytes : nullptr;
  uint8_t* y = (uint8_t*)op.y + row * op.y_stride * bytes;
  float factor = op.scale;
  if (op.factors) {
    const int64_t at = op.positions[row];
    factor *= at >= 0 && at < op.rows ? op.factors[at] : __builtin_nanf("");
  }
  for (int64_t i = from; i < to; i += 16) {
    F value = load_partial(x, i, TYPE, to - i) * splat(factor);
    if (op.cap > 0) value = softcap(value, op.cap);
    if (added) value = value + load_partial(added, i, TYPE, to - i);
    store_partial(y, i, TYPE, value, to - i);
  }
}

}  // namespace

void scaling(const Scaling& op, Worker& worker) {
  const int64_t across = ceil_div(op.d, COLUMNS), count = op.m * across;
  parallel_for(worker, count, chunk_size(worker, count, 8), [&](int64_t item) {
    const int64_t row = item / across, from = item % across * COLUMNS, to = min(from + COLUMNS, op.d);
    if (op.type == FLOAT32) scale_row<FLOAT32>(op, row, from, to);
    if (op.type == FLOAT16) scale_row<FLOAT16>(op, row, from, to);
    if (op.type == BFLOAT16) scale_row<BFLOAT16>(op, row, from, to);
  });
}

}  // namespace ISA
}  // namespace aiakq
