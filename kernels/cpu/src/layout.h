// The packed layout of quantized weights: written by layout.cpp, read by linear_kernel.cpp.
//
// A tile holds TILE outputs, block after block of BLOCK inputs. A block of ``bits`` bits is 2 * bits vectors of 64
// bytes, those of the first 16 outputs alternating with those of the other 16, so that cache lines are read in order;
// otherwise a core keeps a third fewer loads in flight. A vector has one 32-bit lane per output. Its lanes unpack
// to operands of four bytes: operand o holds the codes of inputs 4 o to 4 o + 3 of the block.
//
// 8 bits: operand o is vector o. 4 bits: the lower and the upper halves of the bytes of vector o / 2. 2 bits: pairs of
// bits of vector o / 4. 3 bits: the lower two as for 2 bits, and bit o of the bytes of the third vector. 5 and 6 bits: the
// lower four as for 4 bits, and of the vectors after them bit o of the bytes, or as for 2 bits.
//
// Indices of tables of floats and of 16-bit integers are transposed within each 16 bytes, those of four outputs, because
// AVX2 looks up all bytes of a vector at once and interleaves them to wider numbers: of a table of floats come input 0 of
// each output, then input 1 of each, and so on; of 16-bit integers inputs 0 and 1 of each, then inputs 2 and 3.

#pragma once

#include <cstdint>

#include "common.h"
#include "ops.h"

namespace aiakq {

// Stride in bytes between vectors of the same half block.
constexpr int VECTOR_STRIDE = 128;

// Inputs of one output that are next to each other: the four of an operand, or fewer for a transposed layout.
INLINE int adjacent_inputs(int32_t math) { return math == TABLE ? 1 : math == TABLE_OF_16_BITS ? 2 : 4; }

// The place of input ``i`` of an operand in the 64 bytes of a vector, for lane ``lane``.
INLINE int place_in_vector(int adjacent, int lane, int i) {
  return lane / 4 * 16 + i / adjacent * (4 * adjacent) + lane % 4 * adjacent + i % adjacent;
}

}  // namespace aiakq
