// Weights of a linear layer: from the layout of layout.h to the numbers that linear_kernel.cpp multiplies.

#pragma once

#include "float8.h"
#include "layout.h"

namespace aiakq {
namespace ISA {

// Whether activations are quantized to 8 bits with a scale per block and multiplied with codes as integers.
constexpr bool multiplies_blocks(int32_t math) {
  return math == BLOCKS || math == TABLE_OF_5_BITS || math == TABLE_OF_8_BITS || math == TABLE_OF_16_BITS;
}

// Whether activations and codes are multiplied as floats.
constexpr bool multiplies_floats(int32_t math) { return !multiplies_blocks(math) && math != ROWS; }

// Bits of the integers that are multiplied: of the codes, or of what a table holds for them.
template <int MATH, int BITS>
constexpr int MULTIPLIED_BITS = MATH == TABLE_OF_5_BITS    ? 5
                                : MATH == TABLE_OF_8_BITS  ? 8
                                : MATH == TABLE_OF_16_BITS ? 16
                                                           : BITS;

// Whether zero points are subtracted: floats and signed integers have none.
template <int MATH> constexpr bool HAS_ZEROS = MATH != TABLE && MATH != TABLE_OF_16_BITS && !is_float8(MATH);

// The table of a layer whose codes are indices.
struct NoTable {};
template <int MATH> INLINE auto table_of(const Linear& op) {
  if constexpr (MATH == TABLE) return load_float_table(op.table);
  else if constexpr (MATH == TABLE_OF_16_BITS) return load_word_table(op.table);
  else if constexpr (MATH == TABLE_OF_5_BITS || MATH == TABLE_OF_8_BITS) return load_byte_table(op.table);
  else return NoTable{};
}

// Shifts lanes right by SHIFT, or left if it is negative, and keeps the bits of ``mask``.
template <int SHIFT> INLINE I shifted(I x, int32_t mask) {
  if constexpr (SHIFT >= 0) return shift_right<SHIFT>(x) & isplat(mask);
  return shift_left<SHIFT >= 0 ? 0 : -SHIFT>(x) & isplat(mask);
}

// Unpacks operand O of the half block at ``at``.
template <int BITS, int O> INLINE I operand(const uint8_t* at) {
  const auto vector = [&](int number) INLINE_LAMBDA { return iload(at + VECTOR_STRIDE * number); };
  if constexpr (BITS == 8) return vector(O);
  if constexpr (BITS == 2 || BITS == 3) {
    const I low = shifted<O % 4 * 2>(vector(O / 4), 0x03030303);
    if constexpr (BITS == 2) return low;
    return low | shifted<O - 2>(vector(2), 0x04040404);
  }
  if constexpr (BITS >= 4 && BITS <= 6) {
    const I low = shifted<O % 2 * 4>(vector(O / 2), 0x0f0f0f0f);
    if constexpr (BITS == 4) return low;
    if constexpr (BITS == 5) return low | shifted<O - 4>(vector(4), 0x10101010);
    return low | shifted<O % 4 * 2 - 4>(vector(4 + O / 4), 0x30303030);
  }
}

// The same as integers to be multiplied: looked up if there is a table of them.
template <int MATH, int BITS, int O, class Table> INLINE I integers(const Table& table, const uint8_t* at) {
  if constexpr (MATH == TABLE_OF_5_BITS || MATH == TABLE_OF_8_BITS) return look_up(table, operand<BITS, O>(at));
  else return operand<BITS, O>(at);
}

// The step of a group, which several groups share.
INLINE F step_at(const Linear& op, const float* steps, int64_t tile, int64_t group, int half) {
  return load(steps + (tile * op.steps + (group >> op.step_shift)) * TILE + half * 16);
}

INLINE F scales_at(const Linear& op, int64_t tile, int64_t group, int half) {
  const int64_t at = (tile * op.groups + group) * TILE + half * 16;
  if (!op.scale_steps) return load_as_float(op.scales, at, op.scale_type);
  return load_signed_bytes((const int8_t*)op.scales + at) * step_at(op, op.scale_steps, tile, group, half);
}

INLINE F offsets_at(const Linear& op, int64_t tile, int64_t group, int half) {
  const int64_t at = (tile * op.groups + group) * TILE + half * 16;
  if (!op.offset_steps) return load_as_float(op.offsets, at, op.offset_type);
  return load_signed_bytes((const int8_t*)op.offsets + at) * step_at(op, op.offset_steps, tile, group, half);
}

// Zero points relative to the multiplied numbers, which are code - 128 for EXACT with 8 bits.
template <int MATH, int BITS> INLINE F zeros_at(const Linear& op, int64_t tile, int64_t group, int half) {
  constexpr float OFFSET = MATH == EXACT && BITS == 8 ? 128 : 0;
  if (!op.zeros) return splat((float)(1 << (MULTIPLIED_BITS<MATH, BITS> - 1)) - OFFSET);
  return load_as_float(op.zeros, (tile * op.groups + group) * TILE + half * 16, op.zero_type) - splat(OFFSET);
}

// Converts the code of input i of an operand to float; for EXACT with 8 bits, code - 128. 8-bit floats are divided by
// float8_factor if DIVIDED.
template <int MATH, int BITS, bool DIVIDED, int i> INLINE F code_as_float(I four) {
  if constexpr (is_float8(MATH)) {
    const F value = divided_float8<MATH, i>(four);
    return DIVIDED ? value : value * splat(float8_factor(MATH));
  }
  if constexpr (MATH == EXACT && BITS == 8) return byte_minus_128<i>(four);
  if constexpr (MATH == EXACT) return to_float(shift_right<8 * i>(four) & isplat(0xff));
}

}  // namespace ISA
}  // namespace aiakq
