// y = x W^T for weights of 2, 3, 4, 5, 6 or 8 bits, in the layout of layout.h: the code that every LinearMath shares.
//
// E4M3 and E5M2 are EXACT for codes that are 8-bit floats, with activations that may be rounded to e4m3 first (float8.h).
// TABLE is EXACT for codes that are indices of a table of floats; TABLE_OF_5_BITS, 8_BITS and 16_BITS are BLOCKS for
// indices of a table of integers. Offsets are multiplied with the sum of the activations, like zero points.
//
// EXACT multiplies codes and activations as floats. BLOCKS quantizes activations to 8 bits with one scale per block of
// 32, ROWS with one scale per row, and both multiply integers. In all three, zero points are applied to the sum of the
// activations: sum of (code - zero) x = sum of code x - zero * sum of x. To limit cancellation between the two terms,
// EXACT treats 8-bit codes as signed numbers, code - 128, and linear.py bounds its group size.
//
// Each output is computed by the same sequence of operations for any number and content of other rows; only the
// register blocking of rows differs.
//
// Every combination of math, bits and rows is compiled separately: linear_exact.cpp, linear_blocks.cpp,
// linear_tables.cpp and linear_floats.cpp each have some, so that processors share the compilation.

#pragma once

#include "linear_codes.h"
#include "linear_panels.h"
#include "tiles.h"

namespace aiakq {
namespace ISA {

// Selects the code for one combination of math, bits and groups, for rows from ``first`` to ``stop``.
struct Product {
  void (*pack)(const Linear& op, int64_t first, int64_t stop);
  void (*multiply)(const Linear& op, int64_t first, int64_t stop, int64_t tile);
};

// The code for EXACT; BLOCKS; a table of floats or integers; and 8-bit floats.
Product exact_product(const Linear& op);
Product blocks_product(const Linear& op);
Product table_product(const Linear& op);
Product float_product(const Linear& op);

namespace {

// Rows per register block, limited by the accumulators that fit into registers: ``Panels`` has two per output, for a
// group and for all groups, and ``IntegerPanels`` (for ROWS) one. ``SmallGroupPanels`` are for groups of 8 and 16
// inputs.
#if defined(__AVX512F__)
using Panels = Blocks<6, 4, 2, 1>;
using SmallGroupPanels = Blocks<4, 1>;
using IntegerPanels = Blocks<12, 6, 4, 2, 1>;
#elif defined(__AVX2__)
using Panels = Blocks<4, 2, 1>;
using SmallGroupPanels = Blocks<4, 1>;
using IntegerPanels = Blocks<4, 2, 1>;
#else
using Panels = Blocks<1>;
using SmallGroupPanels = Blocks<1>;
using IntegerPanels = Blocks<1>;
#endif
constexpr int MAX_ROWS = IntegerPanels::max;

// Calls step(Int<O>) for O from FIRST to STOP - 1.
template <int FIRST, int STOP, class Step> INLINE void for_each(Step step) {
  step(Int<FIRST>{});
  if constexpr (FIRST + 1 < STOP) for_each<FIRST + 1, STOP>(step);
}

// --- products ----------------------------------------------------------------------------------------------------

// Accumulates the products of the four weights in each lane of w with four activations of each row, the words ``x``.
template <int BITS, int R, int H> INLINE void add_four(I (&sums)[R][H], int h, I w, const uint32_t* x) {
#if PAIRS
  if constexpr (BITS == 8) {
    const I first = even(w), second = odd(w);
    UNROLL for (int r = 0; r < R; r++)
      sums[r][h] = dot2(dot2(sums[r][h], first, isplat((int32_t)x[r])), second, isplat((int32_t)x[R + r]));
    return;
  }
#else
  if constexpr (BITS == 8) {
    UNROLL for (int r = 0; r < R; r++) sums[r][h] = dot4(sums[r][h], w, isplat((int32_t)x[r]));
    return;
  }
#endif
  UNROLL for (int r = 0; r < R; r++) sums[r][h] = dot4_u4(sums[r][h], w, isplat((int32_t)x[r]));
}

// Accumulates the products of what the table holds for ``indices`` with four activations of each row, the words ``x``.
template <int R, int H> INLINE void add_four_words(I (&sums)[R][H], int h, const WordTable& table, I indices, const uint32_t* x) {
  I first, second;
  look_up(table, indices, first, second);
  UNROLL for (int r = 0; r < R; r++)
    sums[r][h] = dot2(dot2(sums[r][h], first, isplat((int32_t)x[r])), second, isplat((int32_t)x[R + r]));
}

template <int R, int H> INLINE void set_to_zero(F (&sums)[R][H]) {
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int h = 0; h < H; h++) sums[r][h] = splat(0);
}

// Operands of codes of BITS bits whose products with activations fit into 16-bit sums of pairs (dot4_u4); 8: all.
#if PAIRS
template <int BITS> constexpr int CHAIN = BITS == 5 ? 4 : BITS == 6 ? 2 : 8;
#else
template <int BITS> constexpr int CHAIN = 8;
#endif

// Accumulates the products of operand O of codes that are indices of a table of floats, with activations ``x``. One half
// of a tile comes after the other, because looking up needs many registers.
template <int O, int R, int H>
INLINE void add_looked_up(const float* x, const FloatTable& table, const uint8_t* at, F (&sums)[R][H]) {
  UNROLL for (int h = 0; h < H; h++) {
    F w[4];
    look_up(table, operand<4, O>(at + 64 * h), w);
    UNROLL for (int i = 0; i < 4; i++)
      UNROLL for (int r = 0; r < R; r++) sums[r][h] = fma(w[i], splat(x[i * R + r]), sums[r][h]);
  }
}

// Accumulates the products of one block into ``sums``, for R rows and H halves of a tile. If a group has 8 or 16
// inputs, PARTS is 4 or 2, and only the group PART of the block is accumulated.
template <int MATH, int BITS, int R, int H, int PARTS, int PART, class Table>
INLINE void add_part(const Panel& rows, const Table& table, int64_t block, const uint8_t* at, F (&sums)[R][H]) {
  constexpr int STEPS = 8 / PARTS;
  if constexpr (multiplies_floats(MATH)) {
    const float* x = (const float*)rows.values + block * BLOCK * R;
    for_each<PART * STEPS, (PART + 1) * STEPS>([&](auto number) INLINE_LAMBDA {
      constexpr int O = decltype(number)::value;
      if constexpr (MATH == TABLE) {
        add_looked_up<O>(x + 4 * O * R, table, at, sums);
      } else {
        I four[H];
        UNROLL for (int h = 0; h < H; h++) four[h] = operand<BITS, O>(at + 64 * h);
        for_each<0, 4>([&](auto number) INLINE_LAMBDA {
          constexpr int i = decltype(number)::value;
          F w[H];
          UNROLL for (int h = 0; h < H; h++) w[h] = code_as_float<MATH, BITS, R == 1, i>(four[h]);
          UNROLL for (int r = 0; r < R; r++) {
            const F value = splat(x[(4 * O + i) * R + r]);
            UNROLL for (int h = 0; h < H; h++) sums[r][h] = fma(w[h], value, sums[r][h]);
          }
        });
      }
    });
  } else {
    constexpr int MULTIPLIED = MULTIPLIED_BITS<MATH, BITS>, WORDS = MULTIPLIED >= (PAIRS ? 8 : 16) ? 2 : 1;
    constexpr int LINK = CHAIN<MULTIPLIED> < STEPS ? CHAIN<MULTIPLIED> : STEPS;
    I totals[R][H], added[R][H];
    const uint32_t* x = rows.values + block * (BLOCK / 4) * WORDS * R;
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int h = 0; h < H; h++) totals[r][h] = isplat(0);
    for_each<PART * STEPS, (PART + 1) * STEPS>([&](auto number) INLINE_LAMBDA {
      constexpr int O = decltype(number)::value;
      if (O % LINK == 0)
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int h = 0; h < H; h++) added[r][h] = isplat(0);
      UNROLL for (int h = 0; h < H; h++) {
        if constexpr (MATH == TABLE_OF_16_BITS) {
          add_four_words(added, h, table, operand<BITS, O>(at + 64 * h), x + O * WORDS * R);
        } else {
          const I w = integers<MATH, BITS, O>(table, at + 64 * h);
          add_four<MULTIPLIED>(added, h, w, x + O * WORDS * R);
        }
      }
      if (O % LINK == LINK - 1)
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int h = 0; h < H; h++)
            totals[r][h] = totals[r][h] + (MULTIPLIED < 8 ? sum_pairs(added[r][h]) : added[r][h]);
    });
    UNROLL for (int r = 0; r < R; r++) {
      const F scale = splat(rows.scales[block * R + r]);
      UNROLL for (int h = 0; h < H; h++) sums[r][h] = fma(to_float(totals[r][h]), scale, sums[r][h]);
    }
  }
}

// Adds the sums of products of a group, scaled and with zero points or offsets applied, to ``totals``.
template <int MATH, int BITS, int R, int H>
INLINE void add_group(const Linear& op, const Panel& rows, int64_t tile, int64_t group, int first_half,
                      F (&sums)[R][H], F (&totals)[R][H]) {
  UNROLL for (int h = 0; h < H; h++) {
    const F scale = scales_at(op, tile, group, first_half + h);
    if (op.offsets) {
      const F offset = offsets_at(op, tile, group, first_half + h);
      UNROLL for (int r = 0; r < R; r++)
        totals[r][h] = totals[r][h] + fma(sums[r][h], scale, offset * splat(rows.sums[group * R + r]));
      continue;
    }
    if constexpr (HAS_ZEROS<MATH>) {
      const F zero = zeros_at<MATH, BITS>(op, tile, group, first_half + h);
      UNROLL for (int r = 0; r < R; r++) sums[r][h] = fnma(zero, splat(rows.sums[group * R + r]), sums[r][h]);
    }
    UNROLL for (int r = 0; r < R; r++) totals[r][h] = fma(sums[r][h], scale, totals[r][h]);
  }
}

// Computes R rows and H halves of one tile for all math but ROWS. Weights are prefetched ``ahead`` bytes ahead unless 0.
template <int MATH, int BITS, int R, int H, int PARTS>
INLINE void multiply_groups(const Linear& op, int64_t row, int64_t tile, int first_half, int64_t ahead) {
  const Panel rows = panel_at(op, row);
  const int64_t blocks = blocks_of(op), inside = op.group / BLOCK;
  const uint8_t* at = op.tiles + tile * blocks * (VECTOR_STRIDE * BITS) + 64 * first_half;
  const auto table = table_of<MATH>(op);
  F totals[R][H];
  set_to_zero(totals);
  const auto prefetch_block = [&]() INLINE_LAMBDA {
    if (ahead) UNROLL for (int i = 0; i < 2 * BITS; i += 3 - H) prefetch(at + ahead + 64 * i);
  };
  if constexpr (PARTS == 1) {
    for (int64_t group = 0, block = 0; group < op.groups; group++) {
      F sums[R][H];
      set_to_zero(sums);
      for (const int64_t stop = block + inside; block < stop; block++, at += VECTOR_STRIDE * BITS) {
        prefetch_block();
        add_part<MATH, BITS, R, H, 1, 0>(rows, table, block, at, sums);
      }
      add_group<MATH, BITS>(op, rows, tile, group, first_half, sums, totals);
    }
  } else {
    for (int64_t block = 0; block < blocks; block++, at += VECTOR_STRIDE * BITS) {
      prefetch_block();
      for_each<0, PARTS>([&](auto number) INLINE_LAMBDA {
        constexpr int PART = decltype(number)::value;
        const int64_t group = block * PARTS + PART;
        if (group >= op.groups) return;
        F sums[R][H];
        set_to_zero(sums);
        add_part<MATH, BITS, R, H, PARTS, PART>(rows, table, block, at, sums);
        add_group<MATH, BITS>(op, rows, tile, group, first_half, sums, totals);
      });
    }
  }
  if constexpr (is_float8(MATH))
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int h = 0; h < H; h++) totals[r][h] = totals[r][h] * splat(rows.scales[r]);
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int h = 0; h < H; h++) write(op, row + r, tile, first_half + h, totals[r][h]);
}

// The same for the totals tile.
template <int MATH, int BITS, int R, int PARTS>
NOINLINE void multiply_groups_of_tile(const Linear& op, int64_t row, int64_t tile, int64_t ahead) {
  constexpr int H = HALVES<R>;
  for (int half = 0; half < 2; half += H) multiply_groups<MATH, BITS, R, H, PARTS>(op, row, tile, half, ahead);
}

// --- dispatch ----------------------------------------------------------------------------------------------------

template <class Panels> void pack(const Linear& op, int64_t first, int64_t stop) {
  Panels::for_each(first, stop, [&](auto rows, int64_t row) { pack_panel(op, row, rows.value); });
}

template <class Panels, int MATH, int BITS, int PARTS>
void multiply(const Linear& op, int64_t first, int64_t stop, int64_t tile) {
  Panels::for_each(first, stop, [&](auto rows, int64_t row) {
    constexpr int R = decltype(rows)::value;
    multiply_groups_of_tile<MATH, BITS, R, PARTS>(op, row, tile, prefetch_distance(op.m, row == first));
  });
}

// No format has groups of 8 inputs with 5 or 6 bits or tables: linear.py pads them to 32, which keeps compilation short.
template <int MATH, int BITS> constexpr bool has_groups_of_8 = (MATH == EXACT || MATH == BLOCKS) && BITS != 5 && BITS != 6;

template <int MATH, int BITS> Product product_of(int32_t group) {
  if constexpr (has_groups_of_8<MATH, BITS>)
    if (group == 8) return {pack<SmallGroupPanels>, multiply<SmallGroupPanels, MATH, BITS, 4>};
  if (group == 16) return {pack<SmallGroupPanels>, multiply<SmallGroupPanels, MATH, BITS, 2>};
  return {pack<Panels>, multiply<Panels, MATH, BITS, 1>};
}

template <int MATH> Product product_of(const Linear& op) {
  switch (op.bits) {
    case 2: return product_of<MATH, 2>(op.group);
    case 3: return product_of<MATH, 3>(op.group);
    case 4: return product_of<MATH, 4>(op.group);
    case 5: return product_of<MATH, 5>(op.group);
    case 6: return product_of<MATH, 6>(op.group);
    default: return product_of<MATH, 8>(op.group);
  }
}

}  // namespace
}  // namespace ISA
}  // namespace aiakq
