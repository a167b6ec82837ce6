// y = x W^T for weights of 2, 3, 4 or 8 bits.
//
// W lies in tiles of 32 outputs, each in blocks of 32 inputs, each in BITS vectors of 64 bytes for 16 outputs (one per
// lane) and as many for the other 16, taking turns: memory is then read line by line, without which a core asks for a
// third less of it at a time. A vector gives operands: per lane, four codes in bytes, those of inputs 4 o to 4 o + 3 of
// the block for operand o.
//
// EXACT multiplies codes and activations as floats. BLOCKS rounds every 32 activations to 8 bits with a scale of their
// own, ROWS a whole row of them, and both multiply integers. In all three, zero points count through the sum of the
// activations: sum of (code - zero) x = sum of code x - zero * sum of x.
//
// An output is the same sequence of operations whatever the other rows are and however many there are of them: only
// which rows are worked on side by side differs.

#include "kernels.h"
#include "tiles.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int BLOCK = 32;
// Rows worked on side by side, and the halves of a tile that go by with them: as many as the registers hold sums for.
// Where integers are summed to the end a row has one sum, not two.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 6, MOST_INTEGER_ROWS = 12;
template <int R> constexpr int HALVES = 2;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 4, MOST_INTEGER_ROWS = 4;
template <int R> constexpr int HALVES = R > 2 ? 1 : 2;
#else
constexpr int MOST_ROWS = 1, MOST_INTEGER_ROWS = 1;
template <int R> constexpr int HALVES = 2;
#endif

// --- activations -------------------------------------------------------------------------------------------------

// Rows that are worked on side by side lie in a panel: the first four bytes of each, the next four of each, and so on, so
// that they are read in one stream. So do their scales, one per block, and their sums, one per group.
struct Panel {
  uint32_t* values;  // floats, or four bytes each
  float *scales, *sums;
};

INLINE int64_t blocks_of(const Linear& a) { return pieces((int64_t)a.group * a.groups, BLOCK); }

// Words of a row's 8-bit activations in a block. Where bytes are multiplied as pairs of 16 bits they lie in such.
INLINE bool paired(const Linear& a) { return PAIRS && a.bits == 8; }
INLINE int64_t code_words(const Linear& a) { return BLOCK / (paired(a) ? 2 : 4); }

// Words that a row takes in the scratch: values, scales, sums.
struct RowWords {
  int64_t values, scales, sums;
};

INLINE RowWords words_of(const Linear& a) {
  const int64_t blocks = blocks_of(a);
  return {blocks * (a.math == EXACT ? BLOCK : code_words(a)), pieces(blocks, 16) * 16, pieces(a.groups, 16) * 16};
}

// The panel that begins with ``row``.
INLINE Panel panel_at(const Linear& a, int64_t row) {
  const RowWords words = words_of(a);
  uint32_t* values = (uint32_t*)a.scratch;
  float* scales = (float*)(values + a.op.m * words.values);
  return {values + row * words.values, scales + row * words.scales, scales + a.op.m * words.scales + row * words.sums};
}

INLINE void put(uint32_t* to, int64_t width, const void* from, int count) {
  for (int i = 0; i < count; i++) memcpy(to + i * width, (const char*)from + 4 * i, 4);
}

// A block's activations in 8 bits: of four, which meet four bytes of weights, the even and the odd ones where paired.
INLINE void put_codes(const Linear& a, const Panel& to, int64_t block, int64_t width, const int8_t (&codes)[BLOCK]) {
  uint32_t* first = to.values + block * code_words(a) * width;
  if (!paired(a)) return put(first, width, codes, BLOCK / 4);
  int16_t wide[BLOCK];
  for (int i = 0; i < BLOCK; i++) wide[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = codes[i];
  put(first, width, wide, BLOCK / 2);
}

// The 32 activations of a block, in the order of the tiles.
INLINE void gather(const Linear& a, int64_t row, int64_t block, F& first, F& second) {
  const int64_t start = row * a.x_stride, at = block * BLOCK;
  if (a.source) {
    alignas(64) float held[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
      const int32_t from = a.source[at + i];
      held[i] = from < 0 ? 0.0f : element(a.x, start + from, a.x_type);
    }
    first = load(held);
    second = load(held + 16);
    return;
  }
  const int64_t left = a.k - at;
  first = left > 0 ? load_some(a.x, start + at, a.x_type, left) : splat(0);
  second = left > 16 ? load_some(a.x, start + at + 16, a.x_type, left - 16) : splat(0);
}

void arrange_floats(const Linear& a, int64_t row, const Panel& to, int64_t width) {
  const int64_t blocks = blocks_of(a), inside = a.group / BLOCK;
  F total = splat(0);
  for (int64_t block = 0; block < blocks; block++) {
    alignas(64) float held[BLOCK];
    F first, second;
    gather(a, row, block, first, second);
    store(held, first);
    store(held + 16, second);
    put(to.values + block * BLOCK * width, width, held, BLOCK);
    if (inside) {
      total = total + first + second;
      if ((block + 1) % inside) continue;
      to.sums[block / inside * width] = sum(total);
      total = splat(0);
    } else {
      for (int at = 0; at < BLOCK; at += a.group) {
        float few = 0;
        for (int i = 0; i < a.group; i++) few += held[at + i];
        const int64_t group = (block * BLOCK + at) / a.group;
        if (group < a.groups) to.sums[group * width] = few;
      }
    }
  }
}

INLINE int32_t sum_of_bytes(const int8_t* at, int64_t count) {
  int32_t total = 0;
  for (int64_t i = 0; i < count; i++) total += at[i];
  return total;
}

// Each block gets the scale max |x| / 127. What is not finite makes the scale not a number, and with it the output.
void round_blocks(const Linear& a, int64_t row, const Panel& to, int64_t width) {
  const int64_t blocks = blocks_of(a), inside = a.group / BLOCK;
  float total = 0;
  for (int64_t block = 0; block < blocks; block++) {
    int8_t codes[BLOCK];
    F first, second;
    gather(a, row, block, first, second);
    const float highest = largest(larger(magnitude(first), magnitude(second)));
    const float broken = sum(first * splat(0) + second * splat(0));
    // Blocks of next to nothing: the reciprocal would be infinite.
    const F steps = splat(highest > 1e-30f ? 127.0f / highest : 0.0f);
    store_low_bytes(codes, to_int(first * steps));
    store_low_bytes(codes + 16, to_int(second * steps));
    const float scale = highest / 127.0f + broken;
    put_codes(a, to, block, width, codes);
    to.scales[block * width] = scale;
    if (inside) {
      total += scale * (float)sum_of_bytes(codes, BLOCK);
      if ((block + 1) % inside) continue;
      to.sums[block / inside * width] = total;
      total = 0;
    } else {
      for (int at = 0; at < BLOCK; at += a.group) {
        const int64_t group = (block * BLOCK + at) / a.group;
        if (group < a.groups) to.sums[group * width] = scale * (float)sum_of_bytes(codes + at, a.group);
      }
    }
  }
}

// One scale for the row, max |x| / 127 or the one that is given; codes are exactly those of x / scale.
void round_row(const Linear& a, int64_t row, const Panel& to, int64_t width) {
  const int64_t blocks = blocks_of(a);
  F highest = splat(0), broken = splat(0), first, second;
  for (int64_t block = 0; block < blocks; block++) {
    gather(a, row, block, first, second);
    highest = larger(highest, larger(magnitude(first), magnitude(second)));
    broken = broken + first * splat(0) + second * splat(0);
  }
  float scale = a.input_scale ? *a.input_scale : largest(highest) / 127.0f;
  if (!a.input_scale && !(scale > 1.17549435e-38f)) scale = 1.17549435e-38f;
  int32_t total = 0;
  const F by = splat(scale), low = splat(-128), high = splat(127);
  for (int64_t block = 0; block < blocks; block++) {
    int8_t codes[BLOCK];
    gather(a, row, block, first, second);
    store_low_bytes(codes, to_int(smaller(larger(first / by, low), high)));
    store_low_bytes(codes + 16, to_int(smaller(larger(second / by, low), high)));
    put_codes(a, to, block, width, codes);
    total += sum_of_bytes(codes, BLOCK);
  }
  to.scales[0] = scale + sum(broken);
  memcpy(to.sums, &total, 4);
}

// Fills the panel of ``width`` rows that begins with row ``first``.
void arrange(const Linear& a, int64_t first, int64_t width) {
  Panel to = panel_at(a, first);
  for (int64_t row = first; row < first + width; row++, to.values++, to.scales++, to.sums++) {
    if (a.math == EXACT) arrange_floats(a, row, to, width);
    if (a.math == BLOCKS) round_blocks(a, row, to, width);
    if (a.math == ROWS) round_row(a, row, to, width);
  }
}

// --- weights -----------------------------------------------------------------------------------------------------

#define LAMBDA __attribute__((always_inline))

template <class Step> INLINE void eight_times(Step step) {
  step(Number<0>{}), step(Number<1>{}), step(Number<2>{}), step(Number<3>{});
  step(Number<4>{}), step(Number<5>{}), step(Number<6>{}), step(Number<7>{});
}

// From one vector of a half block to its next.
constexpr int NEXT = 128;

// Operand O of a half block at ``at``.
template <int BITS, int O> INLINE I operand(const uint8_t* at) {
  if constexpr (BITS == 8) return iload(at + NEXT * O);
  if constexpr (BITS == 4) return right<O % 2 * 4>(iload(at + NEXT * (O / 2))) & isplat(0x0f0f0f0f);
  const I low = right<O % 4 * 2>(iload(at + NEXT * (O / 4))) & isplat(0x03030303);
  if constexpr (BITS == 2) return low;
  // The third bits of all codes are in the last vector, operand O's in bit O of its bytes.
  const I third = iload(at + NEXT * 2);
  if constexpr (O <= 2) return low | (left<2 - O>(third) & isplat(0x04040404));
  return low | (right<O <= 2 ? 0 : O - 2>(third) & isplat(0x04040404));
}

INLINE F scales_at(const Linear& a, int64_t tile, int64_t group, int half) {
  return load_as_float(a.scales, (tile * a.groups + group) * TILE + half * 16, a.scale_type);
}

INLINE F zeros_at(const Linear& a, int64_t tile, int64_t group, int half) {
  if (!a.zeros) return splat((float)(1 << (a.bits - 1)));
  return load_as_float(a.zeros, (tile * a.groups + group) * TILE + half * 16, a.zero_type);
}

// --- products ----------------------------------------------------------------------------------------------------

// Adds the products of four weights in each lane of w and four activations of each row, words of ``x``.
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
  UNROLL for (int r = 0; r < R; r++) sums[r][h] = dot4_small(sums[r][h], w, isplat((int32_t)x[r]));
}

// Adds what one block (or, with groups of 8 or 16, PARTS-th of a block) of R rows gives to ``sums``, of H halves of a tile.
template <int MATH, int BITS, int R, int H, int PARTS>
INLINE void add_part(const Panel& rows, int64_t block, int part, const uint8_t* at, F (&sums)[R][H]) {
  constexpr int STEPS = 8 / PARTS;
  if constexpr (MATH == EXACT) {
    const float* x = (const float*)rows.values + block * BLOCK * R;
    eight_times([&](auto number) LAMBDA {
      constexpr int O = decltype(number)::value;
      if (O / STEPS != part) return;
      I four[H];
      UNROLL for (int h = 0; h < H; h++) four[h] = operand<BITS, O>(at + 64 * h);
      const auto input = [&](auto number) LAMBDA {
        constexpr int i = decltype(number)::value;
        F w[H];
        UNROLL for (int h = 0; h < H; h++) w[h] = to_float(right<8 * i>(four[h]) & isplat(0xff));
        UNROLL for (int r = 0; r < R; r++) {
          const F value = splat(x[(4 * O + i) * R + r]);
          UNROLL for (int h = 0; h < H; h++) sums[r][h] = fma(w[h], value, sums[r][h]);
        }
      };
      input(Number<0>{}), input(Number<1>{}), input(Number<2>{}), input(Number<3>{});
    });
  } else {
    constexpr int WORDS = PAIRS && BITS == 8 ? 2 : 1;
    I whole[R][H];
    const uint32_t* x = rows.values + block * (BLOCK / 4) * WORDS * R;
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int h = 0; h < H; h++) whole[r][h] = isplat(0);
    eight_times([&](auto number) LAMBDA {
      constexpr int O = decltype(number)::value;
      if (O / STEPS != part) return;
      UNROLL for (int h = 0; h < H; h++) {
        const I w = operand<BITS, O>(at + 64 * h);
        add_four<BITS>(whole, h, w, x + O * WORDS * R);
      }
    });
    UNROLL for (int r = 0; r < R; r++) {
      const F scale = splat(rows.scales[block * R + r]);
      UNROLL for (int h = 0; h < H; h++) {
        const I all = BITS <= 4 ? whole_of_small(whole[r][h]) : whole[r][h];
        sums[r][h] = fma(to_float(all), scale, sums[r][h]);
      }
    }
  }
}

// R rows of H halves of one tile: EXACT and BLOCKS. ``ahead`` is how far away the weights are that are to be asked for,
// or 0.
template <int MATH, int BITS, int R, int H, int PARTS>
INLINE void grouped(const Linear& a, int64_t row, int64_t tile, int first_half, int64_t ahead) {
  const Panel rows = panel_at(a, row);
  const int64_t blocks = blocks_of(a), inside = a.group / BLOCK;
  const uint8_t* at = a.tiles + tile * blocks * (NEXT * BITS) + 64 * first_half;
  F totals[R][H];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int h = 0; h < H; h++) totals[r][h] = splat(0);
  int64_t block = 0;
  for (int64_t group = 0; group < a.groups; group++) {
    F sums[R][H];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int h = 0; h < H; h++) sums[r][h] = splat(0);
    if constexpr (PARTS == 1) {
      for (const int64_t stop = block + inside; block < stop; block++, at += NEXT * BITS) {
        if (ahead) UNROLL for (int i = 0; i < 2 * BITS; i += 3 - H) ask_for(at + ahead + 64 * i);
        add_part<MATH, BITS, R, H, 1>(rows, block, 0, at, sums);
      }
    } else {
      const int part = (int)(group % PARTS);
      add_part<MATH, BITS, R, H, PARTS>(rows, block, part, at, sums);
      if (part == PARTS - 1) block++, at += NEXT * BITS;
    }
    UNROLL for (int h = 0; h < H; h++) {
      const F scale = scales_at(a, tile, group, first_half + h), zero = zeros_at(a, tile, group, first_half + h);
      UNROLL for (int r = 0; r < R; r++) {
        const F centred = fnma(zero, splat(rows.sums[group * R + r]), sums[r][h]);
        totals[r][h] = fma(centred, scale, totals[r][h]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int h = 0; h < H; h++) write(a, row + r, tile, first_half + h, totals[r][h]);
}

// The same for the whole tile.
template <int MATH, int BITS, int R, int PARTS>
void grouped_tile(const Linear& a, int64_t row, int64_t tile, int64_t ahead) {
  constexpr int H = HALVES<R>;
  for (int half = 0; half < 2; half += H) grouped<MATH, BITS, R, H, PARTS>(a, row, tile, half, ahead);
}

// R rows of H halves of one tile: ROWS, integers all the way to the end.
template <int R, int H> INLINE void integers(const Linear& a, int64_t row, int64_t tile, int first_half, int64_t ahead) {
  constexpr int WORDS = PAIRS ? 2 : 1;
  const Panel rows = panel_at(a, row);
  const int64_t blocks = blocks_of(a);
  const uint8_t* at = a.tiles + tile * blocks * (NEXT * 8) + 64 * first_half;
  const uint32_t* x = rows.values;
  I whole[R][H];
  UNROLL for (int r = 0; r < R; r++) {
    int32_t total;
    memcpy(&total, rows.sums + r, 4);
    UNROLL for (int h = 0; h < H; h++) whole[r][h] = isplat(-128 * total);
  }
  for (int64_t block = 0; block < blocks; block++, at += NEXT * 8, x += 8 * WORDS * R) {
    if (ahead) UNROLL for (int i = 0; i < 2 * 8; i += 3 - H) ask_for(at + ahead + 64 * i);
    UNROLL for (int o = 0; o < 8; o++)
      UNROLL for (int h = 0; h < H; h++) {
        const I w = iload(at + NEXT * o + 64 * h);
        add_four<8>(whole, h, w, x + o * WORDS * R);
      }
  }
  UNROLL for (int h = 0; h < H; h++) {
    const F scale = scales_at(a, tile, 0, first_half + h);
    UNROLL for (int r = 0; r < R; r++)
      write(a, row + r, tile, first_half + h, to_float(whole[r][h]) * splat(rows.scales[r]) * scale);
  }
}

// The same for the whole tile.
template <int R> void integers_of_tile(const Linear& a, int64_t row, int64_t tile, int64_t ahead) {
  constexpr int H = HALVES<R>;
  for (int half = 0; half < 2; half += H) integers<R, H>(a, row, tile, half, ahead);
}

using Work = void (*)(const Linear&, int64_t row, int64_t tile, int64_t ahead);

// The work for panels of so many rows, widest first; null where the registers do not hold that many.
constexpr int WIDTHS[] = {12, 6, 4, 2, 1};
struct Works {
  Work of[5];
};

// each(first, width, work) for the panels of rows ``row`` to ``stop``: as wide ones as there are rows left for.
template <class Each> INLINE void panels(const Works& works, int64_t row, int64_t stop, Each each) {
  for (int i = 0; i < 5; i++)
    for (; works.of[i] && row + WIDTHS[i] <= stop; row += WIDTHS[i]) each(row, WIDTHS[i], works.of[i]);
}

template <int MATH, int BITS, int R, int PARTS> constexpr Work work() {
  if constexpr (R > MOST_ROWS || (PARTS > 1 && R % 4 == 2))
    return nullptr;
  else
    return grouped_tile<MATH, BITS, R, PARTS>;
}

template <int R> constexpr Work integer_work() {
  if constexpr (R > MOST_INTEGER_ROWS)
    return nullptr;
  else
    return integers_of_tile<R>;
}

template <int MATH, int BITS, int PARTS> constexpr Works works() {
  return {{nullptr, work<MATH, BITS, 6, PARTS>(), work<MATH, BITS, 4, PARTS>(), work<MATH, BITS, 2, PARTS>(),
           work<MATH, BITS, 1, PARTS>()}};
}

template <int MATH, int BITS> Works works_of(int32_t group) {
  return group == 8 ? works<MATH, BITS, 4>() : group == 16 ? works<MATH, BITS, 2>() : works<MATH, BITS, 1>();
}

template <int MATH> Works works_of(const Linear& a) {
  switch (a.bits) {
    case 2: return works_of<MATH, 2>(a.group);
    case 3: return works_of<MATH, 3>(a.group);
    case 4: return works_of<MATH, 4>(a.group);
    default: return works_of<MATH, 8>(a.group);
  }
}

}  // namespace

int64_t linear_scratch(const Linear& a) {
  const RowWords words = words_of(a);
  return 4 * (words.values + words.scales + words.sums);
}

void linear(const void* op, Team& team) {
  const Linear& a = *(const Linear*)op;
  const Works works = a.math == EXACT    ? works_of<EXACT>(a)
                      : a.math == BLOCKS ? works_of<BLOCKS>(a)
                                         : Works{{integer_work<12>(), integer_work<6>(), integer_work<4>(),
                                                  integer_work<2>(), integer_work<1>()}};
  // Whole panels by one thread each: rows of one lie side by side.
  share(team, pieces(a.op.m, MOST_INTEGER_ROWS), 1, [&](int64_t item) {
    const int64_t first = item * MOST_INTEGER_ROWS, stop = least(a.op.m, first + MOST_INTEGER_ROWS);
    panels(works, first, stop, [&](int64_t row, int64_t width, Work) { arrange(a, row, width); });
  });
  share_tiles(team, a, 4 * words_of(a).values, MOST_INTEGER_ROWS, [&](int64_t first, int64_t stop, int64_t tile) {
    panels(works, first, stop,
           [&](int64_t row, int64_t, Work work) { work(a, row, tile, ahead_of(a.op.m, row == first)); });
  });
}

}  // namespace ISA
}  // namespace aiakq
