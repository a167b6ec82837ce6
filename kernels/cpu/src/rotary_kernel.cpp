// What happens between the projections of an attention layer and attention: head norms, rotary positions (Su et al.
// 2021, arXiv:2104.09864), and keys and values into the paged cache. One token at a time, all in floats.

#include "elements.h"
#include "kernels.h"

namespace aiakq {
namespace ISA {
namespace {

// The largest head size; kernels/cpu/attention.py knows it too.
constexpr int64_t MOST = 1024;

// x / rms(x) * weight over ``size`` elements; zeros follow up to a multiple of 16.
void normalize(float* x, const float* weight, int64_t size, float eps) {
  F squares = splat(0);
  for (int64_t i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const F factor = splat(1.0f / __builtin_sqrtf(sum(squares) / (float)size + eps));
  for (int64_t i = 0; i < size; i += 16)
    store_some(x, i, FLOAT32, load(x + i) * factor * load_some(weight, i, FLOAT32, size - i), size - i);
}

// Turns the pairs (x[i], x[i + rotated / 2]).
void rotate(float* x, const float* cosines, const float* sines, int64_t rotated) {
  const int64_t half = rotated / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t left = half - i;
    const F a = load_some(x, i, FLOAT32, left), b = load_some(x, half + i, FLOAT32, left);
    const F cosine = load_some(cosines, i, FLOAT32, left), sine = load_some(sines, i, FLOAT32, left);
    store_some(x, i, FLOAT32, fnma(b, sine, a * cosine), left);
    store_some(x, half + i, FLOAT32, fma(a, sine, b * cosine), left);
  }
}

// One head into floats, normalized and turned where the op says so.
void prepare(const Rotary& a, const void* x, int64_t from, const float* norm, int64_t position, float* head) {
  const int64_t size = a.head_size;
  for (int64_t d = 0; d < size; d += 16) store(head + d, load_some(x, from + d, a.x_type, size - d));
  if (norm) normalize(head, norm, size, a.eps);
  if (a.cosines && position >= 0)
    rotate(head, a.cosines + position * (a.rotated / 2), a.sines + position * (a.rotated / 2), a.rotated);
}

// Element i of a head becomes element from + i * stride of a cache of the same type.
template <class Element>
INLINE void scatter(const uint8_t* head, int64_t size, void* cache, int64_t from, int64_t stride) {
  for (int64_t d = 0; d < size; d++) ((Element*)cache)[from + d * stride] = ((const Element*)head)[d];
}

// A head into a cache, its elements from ``from`` on, ``stride`` apart; 8 bits with the scale max |x| / 127, which is not
// a number if an x is not finite.
void keep(const Rotary& a, const float* head, void* cache, float* scale, int64_t from, int64_t stride) {
  const int64_t size = a.head_size;
  F factor = splat(1);
  if (a.cache_type == INT8) {
    F most = splat(0), broken = splat(0);
    for (int64_t d = 0; d < size; d += 16) {
      most = larger(most, magnitude(load(head + d)));
      broken = fma(load(head + d), splat(0), broken);
    }
    *scale = largest(most) * (1 / 127.0f) + sum(broken);
    factor = splat(*scale > 0 ? 1 / *scale : 0);
  }
  alignas(64) uint8_t held[MOST * 4];
  for (int64_t d = 0; d < size; d += 16) {
    const F value = load(head + d);
    // What is not a number becomes 127: its row's scale is none either.
    if (a.cache_type == INT8)
      store_low_bytes((int8_t*)held + d, to_int(larger(smaller(value * factor, splat(127)), splat(-127))));
    else
      store_as(held, d, a.cache_type, value);
  }
  const int64_t bytes = bytes_of(a.cache_type);
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

void rotary(const void* op, Team& team) {
  const Rotary& a = *(const Rotary*)op;
  const Step& step = *a.step;
  const int64_t size = a.head_size;
  share(team, a.op.m, 1, [&](int64_t token) {
    alignas(64) float head[MOST];
    // Padding is at slot 0, which nobody reads: it is not written either.
    const int64_t position = step.positions ? step.positions[token] : -1, slot = step.slots[token];
    for (int64_t h = 0; a.q && h < a.heads; h++) {
      const int64_t from = token * a.q_stride + h * size;
      prepare(a, a.q, from, a.q_norm, position, head);
      for (int64_t d = 0; d < size; d += 16) store_some(a.q, from + d, a.x_type, load(head + d), size - d);
    }
    const int64_t page = slot / a.page_size, offset = slot % a.page_size;
    for (int64_t h = 0; slot > 0 && h < a.kv_heads; h++) {
      const int64_t block = (page * a.kv_heads + h) * a.page_size, at = block + offset;
      float* scales[2] = {a.k_scales ? a.k_scales + at : nullptr, a.v_scales ? a.v_scales + at : nullptr};
      prepare(a, a.k, token * a.k_stride + h * size, a.k_norm, position, head);
      keep(a, head, a.k_cache, scales[0], block * size + offset, a.page_size);
      prepare(a, a.v, token * a.v_stride + h * size, nullptr, -1, head);
      keep(a, head, a.v_cache, scales[1], at * size, 1);
    }
  });
}

}  // namespace ISA
}  // namespace aiakq
