// Causal depthwise convolution that reads and writes states.
//
// A token's result is one sum over the taps, oldest first, however tokens are split into steps.

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

// Channels per work item.
constexpr int64_t CHANNELS = 64;

// Sixteen channels, or the first ``count`` of them, of one sequence.
template <int TYPE> void convolve(const Convolution& op, int64_t s, int64_t c, int64_t count) {
  const Step& step = *op.step;
  const int64_t bytes = bytes_of(TYPE), before = op.taps - 1, size = before * op.channels;
  const int64_t first = step.query_start[s], end = step.query_start[s + 1];
  F seen[MAX_TAPS], taps[MAX_TAPS];
  for (int64_t j = 0; j < op.taps; j++) taps[j] = load_partial(op.weight + j * op.channels, c, FLOAT32, count);
  const float* source = op.states + step.state_sources[s] * size;
  for (int64_t j = 0; j < before; j++) seen[j] = load_partial(source + j * op.channels, c, FLOAT32, count);
  const F bias = op.bias ? load_partial(op.bias, c, FLOAT32, count) : splat(0);
  int64_t save = step.save_start[s];
  for (int64_t t = first; t < end; t++) {
    F value = load_partial((const uint8_t*)op.x + t * op.x_stride * bytes, c, TYPE, count);
    if (op.before)
      value = value * load_partial((const uint8_t*)op.before + t * op.before_stride * bytes, c, TYPE, count);
    seen[before] = value;
    F sum = bias;
    for (int64_t j = 0; j <= before; j++) sum = fma(seen[j], taps[j], sum);
    if (op.silu) sum = logistic(sum, sum);
    if (op.after) sum = sum * load_partial((const uint8_t*)op.after + t * op.after_stride * bytes, c, TYPE, count);
    store_partial((uint8_t*)op.y + t * op.y_stride * bytes, c, TYPE, sum, count);
    for (int64_t j = 0; j < before; j++) seen[j] = seen[j + 1];
    for (; save < step.save_start[s + 1] && step.state_saves[2 * save] == t - first; save++) {
      float* kept = op.states + step.state_saves[2 * save + 1] * size;
      for (int64_t j = 0; j < before; j++) store_partial(kept + j * op.channels, c, FLOAT32, seen[j], count);
    }
  }
  if (s + 1 < step.sequences) return;
  for (int64_t t = end; t < op.m; t++)
    store_partial((uint8_t*)op.y + t * op.y_stride * bytes, c, TYPE, splat(0), count);
}

}  // namespace

void convolution(const Convolution& op, Worker& worker) {
  const int64_t across = ceil_div(op.channels, CHANNELS), count = op.step->sequences * across;
  parallel_for(worker, count, chunk_size(worker, count, 8), [&](int64_t item) {
    const int64_t s = item / across, from = item % across * CHANNELS, to = min(from + CHANNELS, op.channels);
    for (int64_t c = from; c < to; c += 16) {
      if (op.type == FLOAT32) convolve<FLOAT32>(op, s, c, to - c);
      if (op.type == FLOAT16) convolve<FLOAT16>(op, s, c, to - c);
      if (op.type == BFLOAT16) convolve<BFLOAT16>(op, s, c, to - c);
    }
  });
}

}  // namespace ISA
}  // namespace aiakq
