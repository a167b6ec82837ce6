// Loads and stores of sixteen elements of any float type as floats.

#pragma once

#include "ops.h"
#include "simd.h"

namespace aiakq {
namespace ISA {

INLINE int64_t bytes_of(int32_t type) { return type == FLOAT32 ? 4 : type == UINT8 || type == INT8 ? 1 : 2; }

INLINE F load_as_float(const void* base, int64_t index, int32_t type) {
  switch (type) {
    case FLOAT32: return load((const float*)base + index);
    case FLOAT16: return load_half((const uint16_t*)base + index);
    case BFLOAT16: return load_bf16((const uint16_t*)base + index);
    case INT8: return load_signed_bytes((const int8_t*)base + index);
    default: return load_bytes((const uint8_t*)base + index);
  }
}

INLINE void store_as(void* base, int64_t index, int32_t type, F value) {
  switch (type) {
    case FLOAT32: return store((float*)base + index, value);
    case FLOAT16: return store_half((uint16_t*)base + index, value);
    default: return store_bf16((uint16_t*)base + index, value);
  }
}

// The first ``count`` (1 to 16) of sixteen elements; the other lanes are 0.
INLINE F load_partial(const void* base, int64_t index, int32_t type, int64_t count) {
  if (count >= 16) return load_as_float(base, index, type);
  alignas(64) uint8_t held[64] = {};
  memcpy(held, (const uint8_t*)base + index * bytes_of(type), count * bytes_of(type));
  return load_as_float(held, 0, type);
}

INLINE void store_partial(void* base, int64_t index, int32_t type, F value, int64_t count) {
  if (count >= 16) return store_as(base, index, type, value);
  alignas(64) uint8_t held[64];
  store_as(held, 0, type, value);
  memcpy((uint8_t*)base + index * bytes_of(type), held, count * bytes_of(type));
}

// One element.
INLINE float load_element(const void* base, int64_t index, int32_t type) {
  if (type == FLOAT32) return ((const float*)base)[index];
  alignas(64) float lanes[16];
  store(lanes, load_partial(base, index, type, 1));
  return lanes[0];
}

}  // namespace ISA
}  // namespace aiakq
