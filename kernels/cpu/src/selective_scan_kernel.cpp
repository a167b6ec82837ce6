// Selective scans, the recurrence of Mamba (arXiv:2312.00752).
//
// Channels are independent of each other: a work item is some channels of one sequence, whose states and rates stay in
// the L1 cache for all of its tokens. Sums over the elements of a state have a fixed order, so a token's result does not
// depend on how tokens are split into steps.

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

// Channels per work item.
constexpr int64_t CHANNELS = 64;

// One token's keys or queries as floats.
template <int TYPE> INLINE void read_row(float* to, const void* rows, int64_t row, int64_t stride, int64_t size) {
  const uint8_t* from = (const uint8_t*)rows + row * stride * bytes_of(TYPE);
  for (int64_t i = 0; i < size; i += 16) store(to + i, load_partial(from, i, TYPE, size - i));
}

// Sixteen channels, or the first ``count`` of them, of one sequence.
template <int TYPE> void scan(const SelectiveScan& op, int64_t s, int64_t c, int64_t count) {
  const Step& step = *op.step;
  const int64_t bytes = bytes_of(TYPE), size = op.state_size, row = size * op.channels;
  const int64_t first = step.query_start[s], end = step.query_start[s + 1];
  alignas(64) float state[MAX_STATE_SIZE * 16], rate[MAX_STATE_SIZE * 16];
  alignas(64) float key[MAX_STATE_SIZE + 16], query[MAX_STATE_SIZE + 16];
  const float* source = op.states + step.state_sources[s] * row;
  for (int64_t n = 0; n < size; n++) {
    store(state + 16 * n, load_partial(source + n * op.channels, c, FLOAT32, count));
    store(rate + 16 * n, load_partial(op.rate + n * op.channels, c, FLOAT32, count));
  }
  const F bias = load_partial(op.step_bias, c, FLOAT32, count), skip = load_partial(op.skip, c, FLOAT32, count);
  auto input = [&](const void* rows, int64_t stride, int64_t t) INLINE_LAMBDA {
    return load_partial((const uint8_t*)rows + t * stride * bytes, c, TYPE, count);
  };
  int64_t save = step.save_start[s];
  for (int64_t t = first; t < end; t++) {
    read_row<TYPE>(key, op.keys, t, op.keys_stride, size);
    read_row<TYPE>(query, op.queries, t, op.queries_stride, size);
    const F value = input(op.x, op.x_stride, t), gate = input(op.gate, op.gate_stride, t);
    const F length = softplus(input(op.steps, op.steps_stride, t) + bias), change = length * value;
    F sum = skip * value;
    for (int64_t n = 0; n < size; n++) {
      const F now = fma(splat(key[n]), change, load(state + 16 * n) * exponential(load(rate + 16 * n) * length));
      sum = fma(now, splat(query[n]), sum);
      store(state + 16 * n, now);
    }
    store_partial((uint8_t*)op.y + t * op.y_stride * bytes, c, TYPE, sum * logistic(gate, gate), count);
    for (; save < step.save_start[s + 1] && step.state_saves[2 * save] == t - first; save++) {
      float* kept = op.states + step.state_saves[2 * save + 1] * row;
      for (int64_t n = 0; n < size; n++)
        store_partial(kept + n * op.channels, c, FLOAT32, load(state + 16 * n), count);
    }
  }
  if (s + 1 < step.sequences) return;
  for (int64_t t = end; t < op.m; t++)
    store_partial((uint8_t*)op.y + t * op.y_stride * bytes, c, TYPE, splat(0), count);
}

}  // namespace

void selective_scan(const SelectiveScan& op, Worker& worker) {
  const int64_t across = ceil_div(op.channels, CHANNELS), count = op.step->sequences * across;
  parallel_for(worker, count, chunk_size(worker, count, 4), [&](int64_t item) {
    const int64_t s = item / across, from = item % across * CHANNELS, to = min(from + CHANNELS, op.channels);
    for (int64_t c = from; c < to; c += 16) {
      if (op.type == FLOAT32) scan<FLOAT32>(op, s, c, to - c);
      if (op.type == FLOAT16) scan<FLOAT16>(op, s, c, to - c);
      if (op.type == BFLOAT16) scan<BFLOAT16>(op, s, c, to - c);
    }
  });
}

}  // namespace ISA
}  // namespace aiakq
