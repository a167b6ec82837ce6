// Linear recurrences: the state spaces of Mamba 2 (arXiv:2405.21060), the gated delta rule (arXiv:2412.06464), and this
// with a decay for each element of a key (arXiv:2510.26692).
//
// The columns of a state, one per element of the values, are independent: a work item is some columns of one head of
// one sequence, whose state stays in the L1 cache for all of its tokens. Sums over keys have a fixed order, so a
// token's result does not depend on how tokens are split into steps.

#include <math.h>

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

// Maximum number of vectors of sixteen columns per work item.
constexpr int VECTORS = 4;
// The same as EPSILON in kernels/ops/recurrence.py.
constexpr float EPSILON = 1e-6f;

// One head's query and key of a token, normalized to unit length for the delta rules. All elements of a key have the
// decay ``decay``, or each its own in ``decays``.
struct Token {
  alignas(64) float query[MAX_KEY_SIZE + 16], key[MAX_KEY_SIZE + 16], decays[MAX_KEY_SIZE + 16];
  float decay, step, strength;
};

// Loads a query or key as floats, multiplied by ``scale`` and, if ``unit``, normalized to unit length.
template <int TYPE> INLINE void read_key(float* to, const uint8_t* from, int64_t size, bool unit, float scale) {
  F squares = splat(0);
  for (int64_t i = 0; i < size; i += 16) {
    const F value = load_partial(from, i, TYPE, size - i);
    squares = fma(value, value, squares);
    store(to + i, value);
  }
  if (unit) scale /= sqrtf(reduce_add(squares) + EPSILON);
  for (int64_t i = 0; i < size; i += 16) store(to + i, load(to + i) * splat(scale));
}

INLINE float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// Computes the decay of every element of one head's key; ``steps`` are the inputs of their steps.
template <int TYPE> INLINE void read_decays(const Recurrence& op, const uint8_t* steps, int64_t head, float* decays) {
  const float* bias = op.step_bias + head * op.key_size;
  const F rate = splat(op.rate[head]), low = splat(op.step_low), high = splat(op.step_high);
  for (int64_t i = 0; i < op.key_size; i += 16) {
    const int64_t count = op.key_size - i;
    const F step = softplus(load_partial(steps, i, TYPE, count) + load_partial(bias, i, FLOAT32, count));
    store(decays + i, exponential(rate * min(max(step, low), high)));
  }
}

template <int TYPE> INLINE void read_token(const Recurrence& op, int64_t t, int64_t head, Token& token) {
  const int64_t bytes = bytes_of(TYPE), key_head = head / (op.heads / op.key_heads);
  const int64_t keys = (int64_t)op.key_heads * op.key_size, values = (int64_t)op.heads * op.value_size;
  const bool delta = op.recurrence != STATE_SPACE;
  const uint8_t* x = (const uint8_t*)op.x + t * op.x_stride * bytes;
  const int64_t query = delta ? 0 : values + keys, key = delta ? keys : values, at = key_head * op.key_size;
  const float scale = delta ? 1 / sqrtf((float)op.key_size) : 1;
  read_key<TYPE>(token.query, x + (query + at) * bytes, op.key_size, delta, scale);
  read_key<TYPE>(token.key, x + (key + at) * bytes, op.key_size, delta, 1);
  const uint8_t* gates = (const uint8_t*)op.gates + t * op.gates_stride * bytes;
  token.strength = delta ? op.strength / (1 + expf(-load_element(gates, head, TYPE))) : 0;
  if (op.recurrence == CHANNEL_DELTA_RULE)
    return read_decays<TYPE>(op, gates + (op.heads + head * op.key_size) * bytes, head, token.decays);
  const float step = softplus(load_element(gates, (delta ? op.heads : 0) + head, TYPE) + op.step_bias[head]);
  token.step = step < op.step_low ? op.step_low : step > op.step_high ? op.step_high : step;
  token.decay = expf(op.rate[head] * token.step);
}

// Updates the state with one token and computes its output.
template <int N, int KIND>
INLINE void advance(float* state, const Token& token, int64_t keys, const F* values, F* out) {
  F change[N];
  const F decay = splat(token.decay);
  if constexpr (KIND != STATE_SPACE) {
    F seen[N];
    UNROLL for (int n = 0; n < N; n++) seen[n] = splat(0);
    for (int64_t k = 0; k < keys; k++) {
      const F key = splat(token.key[k]);
      UNROLL for (int n = 0; n < N; n++) {
        const F old = load(state + (k * N + n) * 16) * (KIND == DELTA_RULE ? decay : splat(token.decays[k]));
        seen[n] = fma(old, key, seen[n]);
        store(state + (k * N + n) * 16, old);
      }
    }
    UNROLL for (int n = 0; n < N; n++) change[n] = (values[n] - seen[n]) * splat(token.strength);
  } else {
    UNROLL for (int n = 0; n < N; n++) change[n] = values[n] * splat(token.step);
  }
  UNROLL for (int n = 0; n < N; n++) out[n] = splat(0);
  for (int64_t k = 0; k < keys; k++) {
    const F key = splat(token.key[k]), query = splat(token.query[k]);
    UNROLL for (int n = 0; n < N; n++) {
      F old = load(state + (k * N + n) * 16);
      if constexpr (KIND == STATE_SPACE) old = old * decay;
      const F now = fma(key, change[n], old);
      out[n] = fma(now, query, out[n]);
      store(state + (k * N + n) * 16, now);
    }
  }
}

// Processes up to 16 * N columns, starting at ``from``, of one head of a sequence.
template <int TYPE, int N> void run(const Recurrence& op, int64_t s, int64_t head, int64_t from, int64_t count) {
  const Step& step = *op.step;
  const int64_t bytes = bytes_of(TYPE), keys = op.key_size, row = op.heads * keys * op.value_size;
  const int64_t place = head * keys * op.value_size + from, column = head * op.value_size + from;
  const bool delta = op.recurrence != STATE_SPACE;
  const int64_t first_value = (delta ? 2 * (int64_t)op.key_heads * keys : 0) + column;
  const int64_t first = step.query_start[s], end = step.query_start[s + 1];
  alignas(64) float state[MAX_KEY_SIZE * N * 16];
  Token token;
  const float* source = op.states + step.state_sources[s] * row + place;
  for (int64_t k = 0; k < keys; k++)
    for (int n = 0; n < N; n++)
      store(state + (k * N + n) * 16, load_partial(source + k * op.value_size, 16 * n, FLOAT32, count - 16 * n));
  int64_t save = step.save_start[s];
  for (int64_t t = first; t < end; t++) {
    F values[N], out[N];
    read_token<TYPE>(op, t, head, token);
    const uint8_t* x = (const uint8_t*)op.x + (t * op.x_stride + first_value) * bytes;
    for (int n = 0; n < N; n++) values[n] = load_partial(x, 16 * n, TYPE, count - 16 * n);
    if (op.recurrence == STATE_SPACE) advance<N, STATE_SPACE>(state, token, keys, values, out);
    if (op.recurrence == DELTA_RULE) advance<N, DELTA_RULE>(state, token, keys, values, out);
    if (op.recurrence == CHANNEL_DELTA_RULE) advance<N, CHANNEL_DELTA_RULE>(state, token, keys, values, out);
    uint8_t* y = (uint8_t*)op.y + (t * op.y_stride + column) * bytes;
    for (int n = 0; n < N; n++) {
      if (op.skip) out[n] = fma(values[n], splat(op.skip[head]), out[n]);
      store_partial(y, 16 * n, TYPE, out[n], count - 16 * n);
    }
    for (; save < step.save_start[s + 1] && step.state_saves[2 * save] == t - first; save++) {
      float* kept = op.states + step.state_saves[2 * save + 1] * row + place;
      for (int64_t k = 0; k < keys; k++)
        for (int n = 0; n < N; n++)
          store_partial(kept + k * op.value_size, 16 * n, FLOAT32, load(state + (k * N + n) * 16), count - 16 * n);
    }
  }
  if (s + 1 < step.sequences) return;
  for (int64_t t = end; t < op.m; t++)
    for (int n = 0; n < N; n++)
      store_partial((uint8_t*)op.y + (t * op.y_stride + column) * bytes, 16 * n, TYPE, splat(0), count - 16 * n);
}

template <int TYPE> void run_columns(const Recurrence& op, int64_t s, int64_t head, int64_t from, int64_t count) {
  switch (ceil_div(count, 16)) {
    case 1: return run<TYPE, 1>(op, s, head, from, count);
    case 2: return run<TYPE, 2>(op, s, head, from, count);
    case 3: return run<TYPE, 3>(op, s, head, from, count);
    default: return run<TYPE, VECTORS>(op, s, head, from, count);
  }
}

}  // namespace

void recurrence(const Recurrence& op, Worker& worker) {
  const int64_t across = ceil_div(op.value_size, 16 * VECTORS), count = op.step->sequences * op.heads * across;
  parallel_for(worker, count, chunk_size(worker, count, 4), [&](int64_t item) {
    const int64_t s = item / (op.heads * across), head = item / across % op.heads;
    const int64_t from = item % across * 16 * VECTORS, columns = min(16 * VECTORS, op.value_size - from);
    if (op.type == FLOAT32) run_columns<FLOAT32>(op, s, head, from, columns);
    if (op.type == FLOAT16) run_columns<FLOAT16>(op, s, head, from, columns);
    if (op.type == BFLOAT16) run_columns<BFLOAT16>(op, s, head, from, columns);
  });
}

}  // namespace ISA
}  // namespace aiakq
