// Lookup of rows of a table, which may be stored as the tiles of a dense or a quantized product with the same weights.

#include "elements.h"
#include "kernels.h"
#include "layout.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

// Reads ``count`` values of row ``id``, starting at element i, from a table packed by aiakq_pack_floats.
INLINE F load_from_tile(const Embedding& op, int64_t id, int64_t i, int64_t count) {
  const bool pairs = op.table_type == BFLOAT16;
  const int64_t bytes = bytes_of(op.table_type), lane = id % TILE;
  const uint8_t* tile = (const uint8_t*)op.table + id / TILE * TILE * (pairs ? round_up(op.d, 2) : op.d) * bytes;
  alignas(64) uint8_t held[64] = {};
  if (pairs) {
    for (int64_t at = 0; at < count; at += 2)
      memcpy(held + 2 * at, tile + ((i + at) / 2 * TILE + lane) * 4, 4);
  } else if (bytes == 4) {
    for (int64_t at = 0; at < count; at++) memcpy(held + 4 * at, tile + ((i + at) * TILE + lane) * 4, 4);
  } else {
    for (int64_t at = 0; at < count; at++) memcpy(held + 2 * at, tile + ((i + at) * TILE + lane) * 2, 2);
  }
  return load_as_float(held, 0, op.table_type);
}

// Returns byte ``byte`` of operand ``o`` of the half block at ``at``, see layout.h.
INLINE int32_t code_at(const uint8_t* at, int32_t bits, int o, int byte) {
  const auto vector = [&](int number) INLINE_LAMBDA { return (int32_t)at[VECTOR_STRIDE * number + byte]; };
  switch (bits) {
    case 8: return vector(o);
    case 2: return vector(o / 4) >> o % 4 * 2 & 3;
    case 3: return (vector(o / 4) >> o % 4 * 2 & 3) | (vector(2) >> o & 1) << 2;
    case 5: return (vector(o / 2) >> o % 2 * 4 & 15) | (vector(4) >> o & 1) << 4;
    case 6: return (vector(o / 2) >> o % 2 * 4 & 15) | (vector(4 + o / 4) >> o % 4 * 2 & 3) << 4;
    default: return vector(o / 2) >> o % 2 * 4 & 15;
  }
}

// The number that code ``code`` stands for, before the zero point is subtracted.
INLINE float value_of(const Linear& op, int32_t code) {
  switch (op.math) {
    case TABLE: return ((const float*)op.table)[code];
    case TABLE_OF_5_BITS: return (float)(op.table[code] - 16);
    case TABLE_OF_8_BITS: return (float)(op.table[code] - 128);
    case TABLE_OF_16_BITS: return (float)(int16_t)(op.table[code] | op.table[16 + code] << 8);
    case EXACT: return (float)(op.bits == 8 ? code - 128 : code);
    default: return (float)code;
  }
}

// One of [N / 32, groups, 32] values, of those with steps multiplied by them.
INLINE float value_of_group(const Linear& op, const void* values, int32_t type, const float* steps, int64_t id,
                            int64_t group) {
  const int64_t tile = id / TILE, lane = id % TILE, at = (tile * op.groups + group) * TILE + lane;
  if (!steps) return load_element(values, at, type);
  return (float)((const int8_t*)values)[at] * steps[(tile * op.steps + (group >> op.step_shift)) * TILE + lane];
}

// Row ``id`` of the weight of a quantized product, in the operations that define it: (code - zero) * scale, or
// code * scale + offset.
void decode_row(const Linear& op, int64_t id, void* y, int64_t start, int32_t y_type) {
  const int64_t k = op.k, blocks = ceil_div((int64_t)op.group * op.groups, BLOCK), lane = id % 16;
  const bool symmetric = !op.zeros && !op.offsets && !op.table;
  const float middle = !symmetric || (op.math == EXACT && op.bits == 8) ? 0 : (float)(1 << (op.bits - 1));
  const uint8_t* tile = op.tiles + id / TILE * blocks * VECTOR_STRIDE * op.bits + id % TILE / 16 * 64;
  const int adjacent = adjacent_inputs(op.math);
  float scale = 0, offset = 0, zero = middle;
  alignas(64) float held[16];
  for (int64_t i = 0; i < k; i += 16) {
    if (i % op.group == 0) {
      const int64_t group = i / op.group;
      scale = value_of_group(op, op.scales, op.scale_type, op.scale_steps, id, group);
      if (op.offsets) offset = value_of_group(op, op.offsets, op.offset_type, op.offset_steps, id, group);
      if (op.zeros) zero = value_of_group(op, op.zeros, op.zero_type, nullptr, id, group);
      if (op.zeros && op.math == EXACT && op.bits == 8) zero -= 128;
    }
    const int64_t count = min(16, k - i);
    for (int64_t j = 0; j < count; j++) {
      const int64_t column = i + j;
      const uint8_t* at = tile + column / BLOCK * VECTOR_STRIDE * op.bits;
      const int byte = place_in_vector(adjacent, (int)lane, (int)(column % 4));
      const int32_t code = code_at(at, op.bits, (int)(column % BLOCK / 4), byte);
      held[j] = (value_of(op, code) - zero) * scale + offset;
    }
    store_partial(y, start + i, y_type, load(held), count);
  }
}

}  // namespace

void embedding(const Embedding& op, Worker& worker) {
  const int64_t d = op.d;
  parallel_for(worker, op.m, 1, [&](int64_t row) {
    const int64_t id = op.ids[row];
    const bool in_range = id >= 0 && id < op.vocabulary;
    if (op.linear && in_range) return decode_row(*op.linear, id, op.y, row * op.y_stride, op.y_type);
    for (int64_t i = 0; i < d; i += 16) {
      const int64_t count = min(16, d - i);
      F value = splat(__builtin_nanf(""));
      if (in_range)
        value = op.tiled ? load_from_tile(op, id, i, count) : load_partial(op.table, id * d + i, op.table_type, count);
      store_partial(op.y, row * op.y_stride + i, op.y_type, value, count);
    }
  });
}

}  // namespace ISA
}  // namespace aiakq
