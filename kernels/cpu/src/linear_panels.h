// Activations of a linear layer, packed for the products of linear_kernel.cpp.

#pragma once

#include "float8.h"
#include "linear_codes.h"
#include "tiles.h"

namespace aiakq {
namespace ISA {
namespace {

// The rows of a register block are packed into a panel: the first four bytes of each row, the next four of each, and so
// on, so that they are read as one stream. Their scales, one per block, and their sums, one per group, are packed in
// the same way.
struct Panel {
  uint32_t* values;  // floats, or four 8-bit codes each
  float *scales, *sums;
};

INLINE int64_t blocks_of(const Linear& op) { return ceil_div((int64_t)op.group * op.groups, BLOCK); }

// Whether 8-bit activations are stored as 16 bits, for products of 16-bit pairs; and 32-bit words per row and block.
INLINE bool paired(const Linear& op) {
  return op.math == TABLE_OF_16_BITS || (PAIRS && (op.bits == 8 || op.math == TABLE_OF_8_BITS));
}
INLINE int64_t code_words(const Linear& op) { return BLOCK / (paired(op) ? 2 : 4); }

// 32-bit words per row in the scratch memory.
struct RowWords {
  int64_t values, scales, sums, rounded;
};

INLINE RowWords words_of(const Linear& op) {
  const int64_t blocks = blocks_of(op);
  return {blocks * (multiplies_floats(op.math) ? BLOCK : code_words(op)), round_up(blocks, 16),
          round_up(op.groups, 16), op.rounded ? round_up(op.k, 16) : 0};
}

// Returns the panel that begins with ``row``.
INLINE Panel panel_at(const Linear& op, int64_t row) {
  const RowWords words = words_of(op);
  uint32_t* values = (uint32_t*)op.scratch;
  float* scales = (float*)(values + op.m * words.values);
  return {values + row * words.values, scales + row * words.scales, scales + op.m * words.scales + row * words.sums};
}

// Writes ``count`` words of one row.
INLINE void put(uint32_t* to, int64_t width, const void* from, int count) {
  for (int i = 0; i < count; i++) memcpy(to + i * width, (const char*)from + 4 * i, 4);
}

// Writes a block of 8-bit activations of one row; if paired, each four are reordered to even ones, then odd ones, except
// for TABLE_OF_16_BITS, see layout.h.
INLINE void put_codes(const Linear& op, const Panel& to, int64_t block, int64_t width, const int8_t (&codes)[BLOCK]) {
  uint32_t* first = to.values + block * code_words(op) * width;
  if (!paired(op)) return put(first, width, codes, BLOCK / 4);
  int16_t wide[BLOCK];
  const bool reordered = op.math != TABLE_OF_16_BITS;
  for (int i = 0; i < BLOCK; i++) wide[reordered ? i / 4 * 4 + i % 2 * 2 + i % 4 / 2 : i] = codes[i];
  put(first, width, wide, BLOCK / 2);
}

// Loads the 32 activations of a block, in the order of the tiles.
INLINE void gather(const Linear& op, int64_t row, int64_t block, F& first, F& second) {
  const int64_t start = row * op.x_stride, at = block * BLOCK;
  if (op.source) {
    alignas(64) float held[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
      const int32_t from = op.source[at + i];
      held[i] = from < 0 ? 0.0f : load_element(op.x, start + from, op.x_type);
    }
    first = load(held);
    second = load(held + 16);
    return;
  }
  const int64_t left = op.k - at;
  first = left > 0 ? load_partial(op.x, start + at, op.x_type, left) : splat(0);
  second = left > 16 ? load_partial(op.x, start + at + 16, op.x_type, left - 16) : splat(0);
}

// The largest magnitude of a row.
INLINE float highest_of_row(const Linear& op, int64_t row) {
  F highest = splat(0), first, second;
  for (int64_t block = 0; block < blocks_of(op); block++) {
    gather(op, row, block, first, second);
    highest = max(highest, max(abs(first), abs(second)));
  }
  return reduce_max(highest);
}

// Packs activations for EXACT, and for all others that multiply floats: floats, and their sum per group. For 8-bit
// floats they are divided by the power of two in to.scales, so that they have room for the factor of float8.h.
void pack_floats(const Linear& op, int64_t row, const Panel& to, int64_t width) {
  const int64_t blocks = blocks_of(op), inside = op.group / BLOCK;
  F total = splat(0), by = splat(1), factor = splat(1);
  if (is_float8(op.math)) {
    const float power = power_of_two(highest_of_row(op, row));
    to.scales[0] = power;
    by = splat(1 / power);
    if (width == 1) factor = splat(float8_factor(op.math));
  }
  for (int64_t block = 0; block < blocks; block++) {
    alignas(64) float held[BLOCK];
    F first, second;
    gather(op, row, block, first, second);
    if (is_float8(op.math)) {
      first = first * by * factor;
      second = second * by * factor;
    }
    store(held, first);
    store(held + 16, second);
    put(to.values + block * BLOCK * width, width, held, BLOCK);
    if (inside) {
      total = total + first + second;
      if ((block + 1) % inside) continue;
      to.sums[block / inside * width] = reduce_add(total);
      total = splat(0);
    } else {
      for (int at = 0; at < BLOCK; at += op.group) {
        float few = 0;
        for (int i = 0; i < op.group; i++) few += held[at + i];
        const int64_t group = (block * BLOCK + at) / op.group;
        if (group < op.groups) to.sums[group * width] = few;
      }
    }
  }
}

INLINE int32_t sum_of_bytes(const int8_t* at, int64_t count) {
  int32_t total = 0;
  for (int64_t i = 0; i < count; i++) total += at[i];
  return total;
}

// Packs activations for BLOCKS and tables of integers: codes with the scale max |x| / 127 per block. A non-finite value makes the scale NaN,
// and so the output.
void pack_rounded_blocks(const Linear& op, int64_t row, const Panel& to, int64_t width) {
  const int64_t blocks = blocks_of(op), inside = op.group / BLOCK;
  float total = 0;
  for (int64_t block = 0; block < blocks; block++) {
    int8_t codes[BLOCK];
    F first, second;
    gather(op, row, block, first, second);
    const float highest = reduce_max(max(abs(first), abs(second)));
    const float not_finite = reduce_add(first * splat(0) + second * splat(0));
    // The reciprocal of a tiny scale would be infinite.
    const F steps = splat(highest > 1e-30f ? 127.0f / highest : 0.0f);
    store_low_bytes(codes, to_int(first * steps));
    store_low_bytes(codes + 16, to_int(second * steps));
    const float scale = highest / 127.0f + not_finite;
    put_codes(op, to, block, width, codes);
    to.scales[block * width] = scale;
    if (inside) {
      total += scale * (float)sum_of_bytes(codes, BLOCK);
      if ((block + 1) % inside) continue;
      to.sums[block / inside * width] = total;
      total = 0;
    } else {
      for (int at = 0; at < BLOCK; at += op.group) {
        const int64_t group = (block * BLOCK + at) / op.group;
        if (group < op.groups) to.sums[group * width] = scale * (float)sum_of_bytes(codes + at, op.group);
      }
    }
  }
}

// Packs activations for ROWS: codes with one scale, max |x| / 127 or the given one. The codes are exactly those of
// x / scale.
void pack_rounded_row(const Linear& op, int64_t row, const Panel& to, int64_t width) {
  const int64_t blocks = blocks_of(op);
  F highest = splat(0), not_finite = splat(0), first, second;
  for (int64_t block = 0; block < blocks; block++) {
    gather(op, row, block, first, second);
    highest = max(highest, max(abs(first), abs(second)));
    not_finite = not_finite + first * splat(0) + second * splat(0);
  }
  float scale = op.input_scale ? *op.input_scale : reduce_max(highest) / 127.0f;
  if (!op.input_scale && !(scale > 1.17549435e-38f)) scale = 1.17549435e-38f;
  int32_t total = 0;
  const F by = splat(scale), low = splat(-128), high = splat(127);
  for (int64_t block = 0; block < blocks; block++) {
    int8_t codes[BLOCK];
    gather(op, row, block, first, second);
    store_low_bytes(codes, to_int(min(max(first / by, low), high)));
    store_low_bytes(codes + 16, to_int(min(max(second / by, low), high)));
    put_codes(op, to, block, width, codes);
    total += sum_of_bytes(codes, BLOCK);
  }
  to.scales[0] = scale + reduce_add(not_finite);
  memcpy(to.sums, &total, 4);
}

// Packs activations for E4M3 and E5M2 that are rounded to e4m3.
void pack_rounded_floats(const Linear& op, int64_t row, const Panel& to, int64_t width) {
  const RowWords words = words_of(op);
  float* values = (float*)op.scratch + op.m * (words.values + words.scales + words.sums) + row * words.rounded;
  round_row_to_e4m3(op, row, values);
  Linear rounded = op;
  rounded.x = values;
  rounded.x_type = FLOAT32;
  pack_floats(rounded, 0, to, width);
}

// Packs ``width`` rows starting at ``first`` into a panel.
void pack_panel(const Linear& op, int64_t first, int64_t width) {
  Panel to = panel_at(op, first);
  for (int64_t row = first; row < first + width; row++, to.values++, to.scales++, to.sums++) {
    if (op.rounded) pack_rounded_floats(op, row, to, width);
    else if (multiplies_floats(op.math)) pack_floats(op, row, to, width);
    if (multiplies_blocks(op.math)) pack_rounded_blocks(op, row, to, width);
    if (op.math == ROWS) pack_rounded_row(op, row, to, width);
  }
}

}  // namespace
}  // namespace ISA
}  // namespace aiakq
