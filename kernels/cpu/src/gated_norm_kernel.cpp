// Grouped RMS norm with a gate, applied after the recurrences of Mamba 2, Qwen3-Next and MiniMax.

#include <math.h>

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

template <int TYPE> void norm_group(const GatedNorm& op, int64_t row, int64_t from) {
  const int64_t bytes = bytes_of(TYPE), to = from + op.group;
  const uint8_t* x = (const uint8_t*)op.x + row * op.x_stride * bytes;
  const uint8_t* gate = (const uint8_t*)op.gate + row * op.gate_stride * bytes;
  uint8_t* y = (uint8_t*)op.y + row * op.y_stride * bytes;
  auto gated = [&](F value, int64_t i) {
    const F factor = load_partial(gate, i, TYPE, to - i);
    return value * logistic(op.sigmoid ? splat(1) : factor, factor);
  };
  auto input = [&](int64_t i) {
    const F value = load_partial(x, i, TYPE, to - i);
    return op.gate_first ? gated(value, i) : value;
  };
  F squares = splat(0);
  for (int64_t i = from; i < to; i += 16) {
    const F value = input(i);
    squares = fma(value, value, squares);
  }
  const F scale = splat(1 / sqrtf(reduce_add(squares) / (float)op.group + op.epsilon));
  for (int64_t i = from; i < to; i += 16) {
    const F value = input(i) * scale * load_partial(op.weight, i, FLOAT32, to - i);
    store_partial(y, i, TYPE, op.gate_first ? value : gated(value, i), to - i);
  }
}

}  // namespace

void gated_norm(const GatedNorm& op, Worker& worker) {
  const int64_t groups = op.d / op.group, count = op.m * groups;
  parallel_for(worker, count, chunk_size(worker, count, 16), [&](int64_t item) {
    const int64_t row = item / groups, from = item % groups * op.group;
    if (op.type == FLOAT32) norm_group<FLOAT32>(op, row, from);
    if (op.type == FLOAT16) norm_group<FLOAT16>(op, row, from);
    if (op.type == BFLOAT16) norm_group<BFLOAT16>(op, row, from);
  });
}

}  // namespace ISA
}  // namespace aiakq
