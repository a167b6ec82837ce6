// The inner loop of GPTQ (Frantar et al. 2022, arXiv:2210.17323): see gptq in ops.def. Rows of the weight are
// independent, so WIDTH of them at a time go through all columns of the block, which then stay in the first-level
// cache.

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int64_t LANES = 16, VECTORS = 2, WIDTH = LANES * VECTORS;

// Weights of WIDTH rows.
struct Wide {
  F part[VECTORS];
};

// Only the first ``count`` (1 to WIDTH) of them are read or written.
INLINE Wide load_wide(const float* p, int64_t count) {
  Wide x;
  UNROLL for (int i = 0; i < VECTORS; i++)
    x.part[i] = count > i * LANES ? load_partial(p, i * LANES, FLOAT32, count - i * LANES) : splat(0);
  return x;
}

INLINE void store_wide(float* p, const Wide& x, int64_t count) {
  UNROLL for (int i = 0; i < VECTORS; i++)
    if (count > i * LANES) store_partial(p, i * LANES, FLOAT32, x.part[i], count - i * LANES);
}

INLINE void store_codes(uint8_t* p, const Wide& x, int64_t count) {
  UNROLL for (int i = 0; i < VECTORS; i++) {
    int8_t bytes[LANES];
    if (count <= i * LANES) continue;
    store_low_bytes(bytes, to_int(x.part[i]));
    memcpy(p + i * LANES, bytes, min(LANES, count - i * LANES));
  }
}

// Subtracts ``factors[j] * value`` from every column j > i. Products are rounded before they are subtracted (no fused
// multiply-add), which gives the same codes on every machine.
INLINE void propagate(Wide* columns, int64_t i, int64_t length, const float* factors, const Wide& value) {
  for (int64_t j = i + 1; j < length; j++) {
    const F factor = splat(factors[j]);
    UNROLL for (int v = 0; v < VECTORS; v++) {
      const F product = factor * value.part[v];
      columns[j].part[v] = columns[j].part[v] - product;
    }
  }
}

// ``count`` rows of the weight from row ``from`` on. A SWEEP moves values that were rounded before; else they are
// rounded for the first time.
template <bool SWEEP> void round_columns(const Gptq& op, int64_t from, int64_t count) {
  Wide columns[GPTQ_BLOCK];
  const F top = splat((float)((1 << op.bits) - 1));
  for (int64_t j = 0; j < op.length; j++) columns[j] = load_wide(op.block + j * op.stride + from, count);
  for (int64_t i = 0; i < op.m; i++) {
    const int64_t grid = op.groups[i] * op.grid_stride + from;
    const Wide scale = load_wide(op.scales + grid, count), zero = load_wide(op.zeros + grid, count);
    const float* hinv = op.hinv + i * op.hinv_stride;
    const F step = splat(SWEEP ? op.steps[i] : hinv[i]);
    const Wide x = columns[i];
    Wide code, value, error;
    if constexpr (SWEEP) value = load_wide(op.values + i * op.stride + from, count);
    UNROLL for (int v = 0; v < VECTORS; v++) {
      const F target = SWEEP ? value.part[v] + step * x.part[v] : x.part[v];
      // The order of min and max turns NaN, of a lane without a scale, into 0.
      code.part[v] = min(max(round_nearest(target / scale.part[v]) + zero.part[v], splat(0)), top);
      const F rounded = (code.part[v] - zero.part[v]) * scale.part[v];
      error.part[v] = SWEEP ? rounded - value.part[v] : (x.part[v] - rounded) / step;
      if constexpr (SWEEP) value.part[v] = rounded;
    }
    store_codes(op.codes + op.places[i] * op.grid_stride + from, code, count);
    if constexpr (SWEEP) store_wide(op.values + i * op.stride + from, value, count);
    columns[i] = error;
    propagate(columns, i, op.length, hinv, error);
  }
  for (int64_t j = 0; j < op.length; j++) store_wide(op.block + j * op.stride + from, columns[j], count);
}

}  // namespace

void gptq(const Gptq& op, Worker& worker) {
  parallel_for(worker, ceil_div(op.n, WIDTH), 1, [&](int64_t at) {
    const int64_t from = at * WIDTH, count = min(WIDTH, op.n - from);
    op.values ? round_columns<true>(op, from, count) : round_columns<false>(op, from, count);
  });
}

}  // namespace ISA
}  // namespace aiakq
