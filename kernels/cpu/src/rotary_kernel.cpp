// Prepares queries, keys and values for attention: applies head norms and the rotary embedding (Su et al. 2021,
// arXiv:2104.09864) and writes keys and values to the paged cache. One token at a time, in float32.

#include "elements.h"
#include "kernels.h"

namespace aiakq {
namespace ISA {
namespace {

// Computes x / rms(x) * weight over ``size`` elements, zero-padded to a multiple of 16.
void normalize(float* x, const float* weight, int64_t size, float eps) {
  F squares = splat(0);
  for (int64_t i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const F factor = splat(1.0f / __builtin_sqrtf(reduce_add(squares) / (float)size + eps));
  for (int64_t i = 0; i < size; i += 16)
    store_partial(x, i, FLOAT32, load(x + i) * factor * load_partial(weight, i, FLOAT32, size - i), size - i);
}

// Rotates the pairs (x[2 i], x[2 i + 1]).
void rotate_interleaved(float* x, const float* cosines, const float* sines, int64_t rotated) {
  for (int64_t i = 0; i < rotated / 2; i++) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cosines[i] - b * sines[i];
    x[2 * i + 1] = b * cosines[i] + a * sines[i];
  }
}

// Rotates the pairs (x[i], x[i + rotated / 2]).
void rotate(float* x, const float* cosines, const float* sines, int64_t rotated) {
  const int64_t half = rotated / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t left = half - i;
    const F a = load_partial(x, i, FLOAT32, left), b = load_partial(x, half + i, FLOAT32, left);
    const F cosine = load_partial(cosines, i, FLOAT32, left), sine = load_partial(sines, i, FLOAT32, left);
    store_partial(x, i, FLOAT32, fnma(b, sine, a * cosine), left);
    store_partial(x, half + i, FLOAT32, fma(a, sine, b * cosine), left);
  }
}

// Loads one head as floats, normalized if a weight ``norm`` is given and rotated if a position is given, in the order
// of ``op.rotated_norms``.
void load_head(const Rotary& op, const void* x, int64_t from, int64_t size, const float* norm, int64_t position,
               float* head) {
  for (int64_t d = 0; d < size; d += 16) store(head + d, load_partial(x, from + d, op.x_type, size - d));
  if (norm && !op.rotated_norms) normalize(head, norm, size, op.eps);
  if (op.cosines && position >= 0) {
    const float *cosines = op.cosines + position * (op.rotated / 2), *sines = op.sines + position * (op.rotated / 2);
    (op.interleaved ? rotate_interleaved : rotate)(head, cosines, sines, op.rotated);
  }
  if (norm && op.rotated_norms) normalize(head, norm, size, op.eps);
}

// Writes element i of a head to element from + i * stride of a cache of the same type.
template <class Element>
INLINE void scatter(const uint8_t* head, int64_t size, void* cache, int64_t from, int64_t stride) {
  for (int64_t d = 0; d < size; d++) ((Element*)cache)[from + d * stride] = ((const Element*)head)[d];
}

// Writes a head to a cache, starting at element ``from``, ``stride`` elements apart. An 8-bit cache also gets the scale
// max |x| / 127, which is NaN if an x is not finite.
void store_head(const Rotary& op, const float* head, int64_t size, void* cache, float* scale, int64_t from,
                int64_t stride) {
  F factor = splat(1);
  if (op.cache_type == INT8) {
    F highest = splat(0), not_finite = splat(0);
    for (int64_t d = 0; d < size; d += 16) {
      highest = max(highest, abs(load(head + d)));
      not_finite = fma(load(head + d), splat(0), not_finite);
    }
    *scale = reduce_max(highest) * (1 / 127.0f) + reduce_add(not_finite);
    factor = splat(*scale > 0 ? 1 / *scale : 0);
  }
  alignas(64) uint8_t held[MAX_HEAD_SIZE * 4];
  for (int64_t d = 0; d < size; d += 16) {
    const F value = load(head + d);
    // NaN becomes 127, but then the scale is NaN.
    if (op.cache_type == INT8)
      store_low_bytes((int8_t*)held + d, to_int(max(min(value * factor, splat(127)), splat(-127))));
    else
      store_as(held, d, op.cache_type, value);
  }
  const int64_t bytes = bytes_of(op.cache_type);
  if (stride == 1)
    memcpy((uint8_t*)cache + from * bytes, held, size * bytes);
  else if (bytes == 4)
    scatter<uint32_t>(held, size, cache, from, stride);
  else if (bytes == 2)
    scatter<uint16_t>(held, size, cache, from, stride);
  else
    scatter<uint8_t>(held, size, cache, from, stride);
}

}  // namespace

void rotary(const Rotary& op, Worker& worker) {
  const Step& step = *op.step;
  const int64_t size = op.head_size;
  parallel_for(worker, op.m, 1, [&](int64_t token) {
    alignas(64) float head[MAX_HEAD_SIZE];
    // Slot 0 is padding: it is neither read nor written.
    const int64_t position = step.positions ? step.positions[token] : -1, slot = step.slots[token];
    for (int64_t h = 0; op.q && h < op.heads; h++) {
      const int64_t from = token * op.q_stride + h * size;
      load_head(op, op.q, from, size, op.q_norm, position, head);
      for (int64_t d = 0; d < size; d += 16) store_partial(op.q, from + d, op.x_type, load(head + d), size - d);
    }
    const int64_t page = slot / op.page_size, offset = slot % op.page_size;
    for (int64_t h = 0; slot > 0 && h < op.kv_heads; h++) {
      const int64_t block = (page * op.kv_heads + h) * op.page_size, at = block + offset;
      float* scales[2] = {op.k_scales ? op.k_scales + at : nullptr, op.v_scales ? op.v_scales + at : nullptr};
      load_head(op, op.k, token * op.k_stride + h * size, size, op.k_norm, position, head);
      if (!op.v_cache) {
        store_head(op, head, size, op.k_cache, scales[0], at * size, 1);
        continue;
      }
      store_head(op, head, size, op.k_cache, scales[0], block * size + offset, op.page_size);
      load_head(op, op.v, token * op.v_stride + h * op.value_size, op.value_size, nullptr, -1, head);
      store_head(op, head, op.value_size, op.v_cache, scales[1], at * op.value_size, 1);
    }
  });
}

}  // namespace ISA
}  // namespace aiakq
