// y = x W^T for weights of 2, 3, 4 or 8 bits, in the layout of layout.h.
//
// E4M3 and E5M2 are EXACT for codes that are 8-bit floats, with activations that may be rounded to e4m3 first (float8.h).
// EXACT multiplies codes and activations as floats. BLOCKS quantizes activations to 8 bits with one scale per block of
// 32, ROWS with one scale per row, and both multiply integers. In all three, zero points are applied to the sum of the
// activations: sum of (code - zero) x = sum of code x - zero * sum of x. To limit cancellation between the two terms,
// EXACT treats 8-bit codes as signed numbers, code - 128, and linear.py bounds its group size.
//
// Each output is computed by the same sequence of operations for any number and content of other rows; only the
// register blocking of rows differs.

#include "float8.h"
#include "kernels.h"
#include "layout.h"
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

// --- activations -------------------------------------------------------------------------------------------------

// The rows of a register block are packed into a panel: the first four bytes of each row, the next four of each, and so
// on, so that they are read as one stream. Their scales, one per block, and their sums, one per group, are packed in
// the same way.
struct Panel {
  uint32_t* values;  // floats, or four 8-bit codes each
  float *scales, *sums;
};

INLINE int64_t blocks_of(const Linear& op) { return ceil_div((int64_t)op.group * op.groups, BLOCK); }

// Whether 8-bit activations are stored as 16 bits, for products of 16-bit pairs; and 32-bit words per row and block.
INLINE bool paired(const Linear& op) { return PAIRS && op.bits == 8; }
INLINE int64_t code_words(const Linear& op) { return BLOCK / (paired(op) ? 2 : 4); }

// 32-bit words per row in the scratch memory.
struct RowWords {
  int64_t values, scales, sums, rounded;
};

// Whether activations and codes are multiplied as floats.
constexpr bool multiplies_floats(int32_t math) { return math != BLOCKS && math != ROWS; }

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

// Writes a block of 8-bit activations of one row; if paired, each four are reordered to even ones, then odd ones.
INLINE void put_codes(const Linear& op, const Panel& to, int64_t block, int64_t width, const int8_t (&codes)[BLOCK]) {
  uint32_t* first = to.values + block * code_words(op) * width;
  if (!paired(op)) return put(first, width, codes, BLOCK / 4);
  int16_t wide[BLOCK];
  for (int i = 0; i < BLOCK; i++) wide[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = codes[i];
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

// Packs activations for EXACT: floats, and their sum per group.
void pack_floats(const Linear& op, int64_t row, const Panel& to, int64_t width) {
  const int64_t blocks = blocks_of(op), inside = op.group / BLOCK;
  F total = splat(0);
  for (int64_t block = 0; block < blocks; block++) {
    alignas(64) float held[BLOCK];
    F first, second;
    gather(op, row, block, first, second);
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

// Packs activations for BLOCKS: codes with the scale max |x| / 127 per block. A non-finite value makes the scale NaN,
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
    if (op.math == BLOCKS) pack_rounded_blocks(op, row, to, width);
    if (op.math == ROWS) pack_rounded_row(op, row, to, width);
  }
}

// --- weights -----------------------------------------------------------------------------------------------------

template <class Step> INLINE void eight_times(Step step) {
  step(Int<0>{}), step(Int<1>{}), step(Int<2>{}), step(Int<3>{});
  step(Int<4>{}), step(Int<5>{}), step(Int<6>{}), step(Int<7>{});
}

// Unpacks operand O of the half block at ``at``.
template <int BITS, int O> INLINE I operand(const uint8_t* at) {
  if constexpr (BITS == 8) return iload(at + VECTOR_STRIDE * O);
  if constexpr (BITS == 4) return shift_right<O % 2 * 4>(iload(at + VECTOR_STRIDE * (O / 2))) & isplat(0x0f0f0f0f);
  const I low = shift_right<O % 4 * 2>(iload(at + VECTOR_STRIDE * (O / 4))) & isplat(0x03030303);
  if constexpr (BITS == 2) return low;
  // The third vector holds the third bits of all codes: bit O of its bytes belongs to operand O.
  const I third = iload(at + VECTOR_STRIDE * 2);
  if constexpr (O <= 2) return low | (shift_left<2 - O>(third) & isplat(0x04040404));
  return low | (shift_right<O <= 2 ? 0 : O - 2>(third) & isplat(0x04040404));
}

INLINE F scales_at(const Linear& op, int64_t tile, int64_t group, int half) {
  return load_as_float(op.scales, (tile * op.groups + group) * TILE + half * 16, op.scale_type);
}

// Zero points relative to the multiplied numbers, which are code - 128 for EXACT with 8 bits. 8-bit floats have none.
template <int MATH, int BITS> INLINE F zeros_at(const Linear& op, int64_t tile, int64_t group, int half) {
  if constexpr (MATH == E4M3 || MATH == E5M2) return splat(0);
  constexpr float OFFSET = MATH == EXACT && BITS == 8 ? 128 : 0;
  if (!op.zeros) return splat((float)(1 << (BITS - 1)) - OFFSET);
  return load_as_float(op.zeros, (tile * op.groups + group) * TILE + half * 16, op.zero_type) - splat(OFFSET);
}

// Converts the code of input i of an operand to float; for EXACT with 8 bits, code - 128.
template <int MATH, int BITS, int i> INLINE F code_as_float(I four) {
  if constexpr (MATH == E4M3 || MATH == E5M2) return float8_as_float<MATH, i>(four);
  if constexpr (BITS == 8) return byte_minus_128<i>(four);
  return to_float(shift_right<8 * i>(four) & isplat(0xff));
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

// Accumulates the products of one block into ``sums``, for R rows and H halves of a tile. If a group has 8 or 16
// inputs, PARTS is 4 or 2, and only the group ``part`` of the block is accumulated.
template <int MATH, int BITS, int R, int H, int PARTS>
INLINE void add_part(const Panel& rows, int64_t block, int part, const uint8_t* at, F (&sums)[R][H]) {
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
        UNROLL for (int h = 0; h < H; h++) w[h] = code_as_float<MATH, BITS, i>(four[h]);
        UNROLL for (int r = 0; r < R; r++) {
          const F value = splat(x[(4 * O + i) * R + r]);
          UNROLL for (int h = 0; h < H; h++) sums[r][h] = fma(w[h], value, sums[r][h]);
        }
      };
      input(Int<0>{}), input(Int<1>{}), input(Int<2>{}), input(Int<3>{});
    });
  } else {
    constexpr int WORDS = PAIRS && BITS == 8 ? 2 : 1;
    I totals[R][H];
    const uint32_t* x = rows.values + block * (BLOCK / 4) * WORDS * R;
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int h = 0; h < H; h++) totals[r][h] = isplat(0);
    eight_times([&](auto number) INLINE_LAMBDA {
      constexpr int O = decltype(number)::value;
      if (O / STEPS != part) return;
      UNROLL for (int h = 0; h < H; h++) {
        const I w = operand<BITS, O>(at + 64 * h);
        add_four<BITS>(totals, h, w, x + O * WORDS * R);
      }
    });
    UNROLL for (int r = 0; r < R; r++) {
      const F scale = splat(rows.scales[block * R + r]);
      UNROLL for (int h = 0; h < H; h++) {
        const I total = BITS <= 4 ? sum_pairs(totals[r][h]) : totals[r][h];
        sums[r][h] = fma(to_float(total), scale, sums[r][h]);
      }
    }
  }
}

// Computes R rows and H halves of one tile for all math but ROWS. Weights are prefetched ``ahead`` bytes ahead unless 0.
template <int MATH, int BITS, int R, int H, int PARTS>
INLINE void multiply_groups(const Linear& op, int64_t row, int64_t tile, int first_half, int64_t ahead) {
  const Panel rows = panel_at(op, row);
  const int64_t blocks = blocks_of(op), inside = op.group / BLOCK;
  const uint8_t* at = op.tiles + tile * blocks * (VECTOR_STRIDE * BITS) + 64 * first_half;
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
        add_part<MATH, BITS, R, H, 1>(rows, block, 0, at, sums);
      }
    } else {
      const int part = (int)(group % PARTS);
      add_part<MATH, BITS, R, H, PARTS>(rows, block, part, at, sums);
      if (part == PARTS - 1) block++, at += VECTOR_STRIDE * BITS;
    }
    UNROLL for (int h = 0; h < H; h++) {
      const F scale = scales_at(op, tile, group, first_half + h);
      const F zero = zeros_at<MATH, BITS>(op, tile, group, first_half + h);
      UNROLL for (int r = 0; r < R; r++) {
        const F centred = fnma(zero, splat(rows.sums[group * R + r]), sums[r][h]);
        totals[r][h] = fma(centred, scale, totals[r][h]);
      }
    }
  }
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
    default: return product_of<MATH, 8>(op.group);
  }
}

Product product_of(const Linear& op) {
  switch (op.math) {
    case EXACT: return product_of<EXACT>(op);
    case BLOCKS: return product_of<BLOCKS>(op);
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
