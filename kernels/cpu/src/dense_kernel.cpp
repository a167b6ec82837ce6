// y = x W^T for weights in floats.
//
// W lies in tiles of 32 outputs, input by input; bfloat16 in pairs of inputs, of which the first is the lower half of a
// lane. Sums are float32, one per output, in the order of the inputs, whatever the other rows are. Where the processor
// multiplies pairs of bfloat16 itself and activations come as such, it does: twice the products per instruction.

#include "kernels.h"
#include "tiles.h"

namespace aiakq {
namespace ISA {
namespace {

// Rows at a time, and the halves of a tile that go by with them: as many sums as there are registers for, and no more
// weights than the second cache delivers meanwhile.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12;
template <int R> constexpr int HALVES = 2;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 4;
template <int R> constexpr int HALVES = R > 2 ? 1 : 2;
#else
constexpr int MOST_ROWS = 1;
template <int R> constexpr int HALVES = 2;
#endif

struct Source {
  const float* base;
  int64_t stride;
};

#if defined(__AVX512VNNI__) && (defined(__clang__) || __GNUC__ >= 10)
// Of this instruction set alone no file is compiled: a processor that has it has the rest as well.
#define WITH_PAIRS __attribute__((target("avx512bf16")))
WITH_PAIRS INLINE F dot2(F acc, I w, I x) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)x.v)}; }
INLINE bool multiplies_pairs() { return __builtin_cpu_supports("avx512bf16"); }
#else
#define WITH_PAIRS
INLINE F dot2(F acc, I, I) { return acc; }
INLINE bool multiplies_pairs() { return false; }
#endif

INLINE int64_t even(int64_t k) { return k + k % 2; }

// H halves of a tile from ``half`` on. ``ahead`` is how far away the weights are that are to be asked for, or 0.
template <int TYPE, int R, int H>
void rows(const Dense& a, const Source& x, int64_t row, int64_t tile, int half, int64_t ahead) {
  constexpr int SIZE = TYPE == FLOAT32 ? 4 : 2;
  const int64_t k = TYPE == BFLOAT16 ? even(a.k) : a.k;
  // Halves lie side by side: sixteen elements, or sixteen pairs.
  const int64_t bytes = TYPE == FLOAT16 ? 32 : 64;
  const uint8_t* at = (const uint8_t*)a.tiles + tile * k * TILE * SIZE + half * bytes;
  const float* from[R];
  F sums[R][H];
  UNROLL for (int r = 0; r < R; r++) {
    from[r] = x.base + (row + r) * x.stride;
    UNROLL for (int h = 0; h < H; h++) sums[r][h] = splat(0);
  }
  if constexpr (TYPE == BFLOAT16) {
    const I high = isplat((int32_t)0xffff0000);
    for (int64_t i = 0; i < k; i += 2, at += 128) {
      if (ahead) {
        UNROLL for (int h = 0; h < H; h++) ask_for(at + ahead + h * 64);
      }
      F w[H];
      UNROLL for (int h = 0; h < H; h++) w[h] = bits_as_float(left<16>(iload(at + h * 64)));
      UNROLL for (int r = 0; r < R; r++) {
        const F value = splat(from[r][i]);
        UNROLL for (int h = 0; h < H; h++) sums[r][h] = fma(w[h], value, sums[r][h]);
      }
      UNROLL for (int h = 0; h < H; h++) w[h] = bits_as_float(iload(at + h * 64) & high);
      UNROLL for (int r = 0; r < R; r++) {
        const F value = splat(from[r][i + 1]);
        UNROLL for (int h = 0; h < H; h++) sums[r][h] = fma(w[h], value, sums[r][h]);
      }
    }
  } else {
    for (int64_t i = 0; i < k; i++, at += TILE * SIZE) {
      if (ahead) ask_for(at + ahead), ask_for(at + ahead + (H * 16 * SIZE - 64));
      F w[H];
      UNROLL for (int h = 0; h < H; h++) w[h] = load_as_float(at, h * 16, TYPE);
      UNROLL for (int r = 0; r < R; r++) {
        const F value = splat(from[r][i]);
        UNROLL for (int h = 0; h < H; h++) sums[r][h] = fma(w[h], value, sums[r][h]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int h = 0; h < H; h++) write(a, row + r, tile, half + h, sums[r][h]);
}

// The same for activations in bfloat16, with instructions that multiply pairs.
template <int R> WITH_PAIRS void paired_rows(const Dense& a, int64_t row, int64_t tile, int64_t ahead) {
  const uint8_t* at = (const uint8_t*)a.tiles + tile * a.k * TILE * 2;
  const uint16_t* from[R];
  F sums[R][2];
  UNROLL for (int r = 0; r < R; r++) {
    from[r] = (const uint16_t*)a.x + (row + r) * a.x_stride;
    sums[r][0] = sums[r][1] = splat(0);
  }
  for (int64_t i = 0; i < a.k; i += 2, at += 128) {
    if (ahead) ask_for(at + ahead), ask_for(at + ahead + 64);
    const I first = iload(at), second = iload(at + 64);
    UNROLL for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, from[r] + i, 4);
      const I x = isplat(pair);
      sums[r][0] = dot2(sums[r][0], first, x);
      sums[r][1] = dot2(sums[r][1], second, x);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int half = 0; half < 2; half++) write(a, row + r, tile, half, sums[r][half]);
}

// work(how many as a Number, the first, how far to ask ahead) for the rows of a lot, as many at a time as there are left.
template <class Work> INLINE void side_by_side(const Dense& a, int64_t first, int64_t stop, Work work) {
  int64_t row = first;
  const auto all = [&](auto count) {
    constexpr int R = decltype(count)::value;
    if constexpr (R <= MOST_ROWS)
      for (; row + R <= stop; row += R) work(count, row, ahead_of(a.op.m, row == first));
  };
  all(Number<12>{}), all(Number<4>{}), all(Number<2>{}), all(Number<1>{});
}

template <int TYPE> void rows_of(const Dense& a, const Source& x, int64_t first, int64_t stop, int64_t tile) {
  side_by_side(a, first, stop, [&](auto count, int64_t row, int64_t ahead) {
    constexpr int R = decltype(count)::value, H = HALVES<R>;
    // One row of 32 bits is slower with it (docs/log.md).
    const int64_t far = TYPE == FLOAT32 && R == 1 ? 0 : ahead;
    for (int half = 0; half < 2; half += H) rows<TYPE, R, H>(a, x, row, tile, half, far);
  });
}

}  // namespace

int64_t dense_scratch(const Dense& a) { return pieces(even(a.k) * 4, 64) * 64; }

void dense(const void* op, Team& team) {
  const Dense& a = *(const Dense*)op;
  const int64_t m = a.op.m;
  if (a.weight_type == BFLOAT16 && a.x_type == BFLOAT16 && a.k % 2 == 0 && multiplies_pairs())
    return share_tiles(team, a, (int64_t)a.k * 2, MOST_ROWS,
                       [&](int64_t first, int64_t stop, int64_t tile) {
                         side_by_side(a, first, stop, [&](auto count, int64_t row, int64_t ahead) {
                           paired_rows<decltype(count)::value>(a, row, tile, ahead);
                         });
                       });
  Source x = {(const float*)a.x, a.x_stride};
  if (a.x_type != FLOAT32 || (a.k % 2 && a.weight_type == BFLOAT16)) {
    x = {(const float*)a.scratch, dense_scratch(a) / 4};
    share(team, m, 1, [&](int64_t row) {
      float* to = (float*)a.scratch + row * x.stride;
      for (int64_t i = 0; i < a.k; i += 16)
        store_some(to, i, FLOAT32, load_some(a.x, row * a.x_stride + i, a.x_type, a.k - i), a.k - i);
      if (a.k % 2) to[a.k] = 0;
    });
  }
  share_tiles(team, a, (int64_t)a.k * 4, MOST_ROWS, [&](int64_t row, int64_t stop, int64_t tile) {
    if (a.weight_type == FLOAT32) rows_of<FLOAT32>(a, x, row, stop, tile);
    if (a.weight_type == FLOAT16) rows_of<FLOAT16>(a, x, row, stop, tile);
    if (a.weight_type == BFLOAT16) rows_of<BFLOAT16>(a, x, row, stop, tile);
  });
}

}  // namespace ISA
}  // namespace aiakq
