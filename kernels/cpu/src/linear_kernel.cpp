// y = x W^T for weights of 2, 3, 4, 5, 6 or 8 bits, in the layout of layout.h.
//
// E4M3 and E5M2 are EXACT for codes that are 8-bit floats, with activations that may be rounded to e4m3 first (float8.h).
// TABLE is EXACT for codes that are indices of a table of floats; TABLE_OF_5_BITS and TABLE_OF_8_BITS are BLOCKS for
// indices of a table of integers. Offsets are multiplied with the sum of the activations, like zero points.
//
// EXACT multiplies codes and activations as floats. BLOCKS quantizes activations to 8 bits with one scale per block of
// 32, ROWS with one scale per row, and both multiply integers. In all three, zero points are applied to the sum of the
// activations: sum of (code - zero) x = sum of code x - zero * sum of x. To limit cancellation between the two terms,
// EXACT treats 8-bit codes as signed numbers, code - 128, and linear.py bounds its group size.
//
// Each output is computed by the same sequence of operations for any number and content of other rows; only the
// register blocking of rows differs.

#include "kernels.h"
#include "linear_codes.h"
#include "linear_panels.h"
#include "tiles.h"

namespace aiakq {
namespace ISA {
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

template <class Step> INLINE void eight_times(Step step) {
  step(Int<0>{}), step(Int<1>{}), step(Int<2>{}), step(Int<3>{});
  step(Int<4>{}), step(Int<5>{}), step(Int<6>{}), step(Int<7>{});
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

// Operands of codes of BITS bits whose products with activations fit into 16-bit sums of pairs (dot4_u4); 8: all.
#if PAIRS
template <int BITS> constexpr int CHAIN = BITS == 5 ? 4 : BITS == 6 ? 2 : 8;
#else
template <int BITS> constexpr int CHAIN = 8;
#endif

// Accumulates the products of one block into ``sums``, for R rows and H halves of a tile. If a group has 8 or 16
// inputs, PARTS is 4 or 2, and only the group ``part`` of the block is accumulated.
template <int MATH, int BITS, int R, int H, int PARTS, class Table>
INLINE void add_part(const Panel& rows, const Table& table, int64_t block, int part, const uint8_t* at,
                     F (&sums)[R][H]) {
  constexpr int STEPS = 8 / PARTS;
  if constexpr (multiplies_floats(MATH)) {
    const float* x = (const float*)rows.values + block * BLOCK * R;
    eight_times([&](auto number) INLINE_LAMBDA {
      constexpr int O = decltype(number)::value;
      if (O / STEPS != part) return;
      I four[H];
      UNROLL for (int h = 0; h < H; h++) four[h] = operand<BITS, O>(at + 64 * h);
      const auto input = [&](auto number) INLINE_LAMBDA {
        constexpr int i = decltype(number)::value;
        F w[H];
        UNROLL for (int h = 0; h < H; h++) w[h] = code_as_float<MATH, BITS, R == 1, i>(table, four[h]);
        UNROLL for (int r = 0; r < R; r++) {
          const F value = splat(x[(4 * O + i) * R + r]);
          UNROLL for (int h = 0; h < H; h++) sums[r][h] = fma(w[h], value, sums[r][h]);
        }
      };
      input(Int<0>{}), input(Int<1>{}), input(Int<2>{}), input(Int<3>{});
    });
  } else {
    constexpr int MULTIPLIED = MULTIPLIED_BITS<MATH, BITS>, WORDS = PAIRS && MULTIPLIED == 8 ? 2 : 1;
    constexpr int LINK = CHAIN<MULTIPLIED> < STEPS ? CHAIN<MULTIPLIED> : STEPS;
    I totals[R][H], added[R][H];
    const uint32_t* x = rows.values + block * (BLOCK / 4) * WORDS * R;
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int h = 0; h < H; h++) totals[r][h] = isplat(0);
    eight_times([&](auto number) INLINE_LAMBDA {
      constexpr int O = decltype(number)::value;
      if (O / STEPS != part) return;
      if (O % LINK == 0)
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int h = 0; h < H; h++) added[r][h] = isplat(0);
      UNROLL for (int h = 0; h < H; h++) {
        const I w = integers<MATH, BITS, O>(table, at + 64 * h);
        add_four<MULTIPLIED>(added, h, w, x + O * WORDS * R);
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

// Computes R rows and H halves of one tile for all math but ROWS. Weights are prefetched ``ahead`` bytes ahead unless 0.
template <int MATH, int BITS, int R, int H, int PARTS>
INLINE void multiply_groups(const Linear& op, int64_t row, int64_t tile, int first_half, int64_t ahead) {
  const Panel rows = panel_at(op, row);
  const int64_t blocks = blocks_of(op), inside = op.group / BLOCK;
  const uint8_t* at = op.tiles + tile * blocks * (VECTOR_STRIDE * BITS) + 64 * first_half;
  const auto table = table_of<MATH>(op);
  F totals[R][H];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int h = 0; h < H; h++) totals[r][h] = splat(0);
  int64_t block = 0;
  for (int64_t group = 0; group < op.groups; group++) {
    F sums[R][H];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int h = 0; h < H; h++) sums[r][h] = splat(0);
    if constexpr (PARTS == 1) {
      for (const int64_t stop = block + inside; block < stop; block++, at += VECTOR_STRIDE * BITS) {
        if (ahead) UNROLL for (int i = 0; i < 2 * BITS; i += 3 - H) prefetch(at + ahead + 64 * i);
        add_part<MATH, BITS, R, H, 1>(rows, table, block, 0, at, sums);
      }
    } else {
      const int part = (int)(group % PARTS);
      add_part<MATH, BITS, R, H, PARTS>(rows, table, block, part, at, sums);
      if (part == PARTS - 1) block++, at += VECTOR_STRIDE * BITS;
    }
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
        UNROLL for (int r = 0; r < R; r++)
          sums[r][h] = fnma(zero, splat(rows.sums[group * R + r]), sums[r][h]);
      }
      UNROLL for (int r = 0; r < R; r++) totals[r][h] = fma(sums[r][h], scale, totals[r][h]);
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

// Computes R rows and H halves of one tile for ROWS, whose accumulators remain integers until the end.
template <int R, int H>
INLINE void multiply_integers(const Linear& op, int64_t row, int64_t tile, int first_half, int64_t ahead) {
  constexpr int WORDS = PAIRS ? 2 : 1;
  const Panel rows = panel_at(op, row);
  const int64_t blocks = blocks_of(op);
  const uint8_t* at = op.tiles + tile * blocks * (VECTOR_STRIDE * 8) + 64 * first_half;
  const uint32_t* x = rows.values;
  I totals[R][H];
  UNROLL for (int r = 0; r < R; r++) {
    int32_t total;
    memcpy(&total, rows.sums + r, 4);
    UNROLL for (int h = 0; h < H; h++) totals[r][h] = isplat(-128 * total);
  }
  for (int64_t block = 0; block < blocks; block++, at += VECTOR_STRIDE * 8, x += 8 * WORDS * R) {
    if (ahead) UNROLL for (int i = 0; i < 2 * 8; i += 3 - H) prefetch(at + ahead + 64 * i);
    UNROLL for (int o = 0; o < 8; o++)
      UNROLL for (int h = 0; h < H; h++) {
        const I w = iload(at + VECTOR_STRIDE * o + 64 * h);
        add_four<8>(totals, h, w, x + o * WORDS * R);
      }
  }
  UNROLL for (int h = 0; h < H; h++) {
    const F scale = scales_at(op, tile, 0, first_half + h);
    UNROLL for (int r = 0; r < R; r++)
      write(op, row + r, tile, first_half + h, to_float(totals[r][h]) * splat(rows.scales[r]) * scale);
  }
}

// The same for the totals tile.
template <int R> NOINLINE void multiply_integers_of_tile(const Linear& op, int64_t row, int64_t tile, int64_t ahead) {
  constexpr int H = HALVES<R>;
  for (int half = 0; half < 2; half += H) multiply_integers<R, H>(op, row, tile, half, ahead);
}

// --- dispatch ----------------------------------------------------------------------------------------------------

// Selects the code for one combination of math, bits and groups, for rows from ``first`` to ``stop``.
struct Product {
  void (*pack)(const Linear& op, int64_t first, int64_t stop);
  void (*multiply)(const Linear& op, int64_t first, int64_t stop, int64_t tile);
};

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

void multiply_rows(const Linear& op, int64_t first, int64_t stop, int64_t tile) {
  IntegerPanels::for_each(first, stop, [&](auto rows, int64_t row) {
    multiply_integers_of_tile<decltype(rows)::value>(op, row, tile, prefetch_distance(op.m, row == first));
  });
}

template <int MATH, int BITS> Product product_of(int32_t group) {
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

Product product_of(const Linear& op) {
  switch (op.math) {
    case EXACT: return product_of<EXACT>(op);
    case BLOCKS: return product_of<BLOCKS>(op);
    case TABLE: return product_of<TABLE, 4>(op.group);
    case TABLE_OF_5_BITS: return product_of<TABLE_OF_5_BITS, 4>(op.group);
    case TABLE_OF_8_BITS: return product_of<TABLE_OF_8_BITS, 4>(op.group);
    case E4M3: return {pack<Panels>, multiply<Panels, E4M3, 8, 1>};
    case E5M2: return {pack<Panels>, multiply<Panels, E5M2, 8, 1>};
    default: return {pack<IntegerPanels>, multiply_rows};
  }
}

}  // namespace

int64_t scratch_bytes(const Linear& op) {
  const RowWords words = words_of(op);
  return 4 * (words.values + words.scales + words.sums + words.rounded);
}

void linear(const Linear& op, Worker& worker) {
  const Product product = product_of(op);
  // A panel is packed by one thread and never split by the row blocks below: both hold multiples of MAX_ROWS.
  parallel_for(worker, ceil_div(op.m, MAX_ROWS), 1, [&](int64_t item) {
    const int64_t first = item * MAX_ROWS;
    product.pack(op, first, min(op.m, first + MAX_ROWS));
  });
  parallel_for_tiles(worker, op, 4 * words_of(op).values, MAX_ROWS,
                     [&](int64_t first, int64_t stop, int64_t tile) { product.multiply(op, first, stop, tile); });
}

}  // namespace ISA
}  // namespace aiakq
