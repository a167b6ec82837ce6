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
// Indices of a table of floats are transposed: bytes 4 i to 4 i + 3 of each 16 are input i of four outputs, because AVX2
// looks up all bytes of a vector at once and interleaves them to floats.

#pragma once

namespace aiakq {

// Stride in bytes between vectors of the same half block.
constexpr int VECTOR_STRIDE = 128;

}  // namespace aiakq
