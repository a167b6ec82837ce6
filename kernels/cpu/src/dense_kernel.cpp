// y = x W^T with float weights.
//
// W is packed in tiles of 32 outputs, input by input; bfloat16 in pairs of inputs, the first in the lower half of a
// lane. Accumulation is float32, one accumulator per output, in the order of the inputs, independent of other rows. If
// the processor has bfloat16 dot products (vnni_bf16) and the activations are bfloat16 too, they are used: twice the
// products per instruction, accumulated in pairs.

#include "kernels.h"
#include "product_items.h"
#include "tiles.h"

namespace aiakq {
namespace ISA {
namespace {

// Rows per register block, limited by the number of accumulators that fit into registers. Every further block reads the
// tile again, so that there is one for each of the small numbers of rows of a verification of draft tokens.
#if defined(__AVX512F__)
using RowBlocks = Blocks<12, 8, 6, 5, 4, 3, 2, 1>;
#elif defined(__AVX2__)
using RowBlocks = Blocks<4, 2, 1>;
#else
using RowBlocks = Blocks<1>;
#endif

// Activations in float32.
struct Source {
  const float* base;
  int64_t stride;
};

#if defined(__AVX512VNNI__) && BF16_PRODUCTS
// acc + the two products of bfloat16 pairs in each lane. Enabled per function: no file is compiled for this instruction
// set.
#define WITH_BF16 __attribute__((target("avx512bf16")))
WITH_BF16 INLINE F dot2_bf16(F acc, I w, I x) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)x.v)}; }
#else
#define WITH_BF16
INLINE F dot2_bf16(F acc, I, I) { return acc; }
#endif

// Prefetch distance for weights, see tiles.h. With AVX-512 it pays from two rows on.
INLINE int64_t prefetch_from_two_rows(int64_t m, bool first) {
#if defined(__AVX512F__)
  return first && m > 1 ? 4096 : 0;
#else
  return prefetch_distance(m, first);
#endif
}

// R rows and H halves of a tile from ``half`` on. Weights are prefetched ``ahead`` bytes ahead, unless that is 0.
template <int TYPE, int R, int H>
void multiply(const Dense& op, const Source& x, int64_t row, int64_t tile, int half, int64_t ahead) {
  constexpr int SIZE = TYPE == FLOAT32 ? 4 : 2;
  const int64_t k = TYPE == BFLOAT16 ? round_up(op.k, 2) : op.k;
  // Half a row of a tile: sixteen elements, or sixteen pairs.
  const int64_t bytes = TYPE == FLOAT16 ? 32 : 64;
  const uint8_t* at = (const uint8_t*)op.tiles + tile * k * TILE * SIZE + half * bytes;
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
        UNROLL for (int h = 0; h < H; h++) prefetch(at + ahead + h * 64);
      }
      F w[H];
      UNROLL for (int h = 0; h < H; h++) w[h] = bits_as_float(shift_left<16>(iload(at + h * 64)));
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
      if (ahead) prefetch(at + ahead), prefetch(at + ahead + (H * 16 * SIZE - 64));
      F w[H];
      UNROLL for (int h = 0; h < H; h++) w[h] = load_as_float(at, h * 16, TYPE);
      UNROLL for (int r = 0; r < R; r++) {
        const F value = splat(from[r][i]);
        UNROLL for (int h = 0; h < H; h++) sums[r][h] = fma(w[h], value, sums[r][h]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int h = 0; h < H; h++) write(op, row + r, tile, half + h, sums[r][h]);
}

// The same for a whole tile and bfloat16 activations, with bfloat16 dot products.
template <int R> WITH_BF16 void multiply_bf16(const Dense& op, int64_t row, int64_t tile, int64_t ahead) {
  const uint8_t* at = (const uint8_t*)op.tiles + tile * op.k * TILE * 2;
  const uint16_t* from[R];
  F sums[R][2];
  UNROLL for (int r = 0; r < R; r++) {
    from[r] = (const uint16_t*)op.x + (row + r) * op.x_stride;
    sums[r][0] = sums[r][1] = splat(0);
  }
  for (int64_t i = 0; i < op.k; i += 2, at += 128) {
    if (ahead) prefetch(at + ahead), prefetch(at + ahead + 64);
    const I first = iload(at), second = iload(at + 64);
    UNROLL for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, from[r] + i, 4);
      const I x = isplat(pair);
      sums[r][0] = dot2_bf16(sums[r][0], first, x);
      sums[r][1] = dot2_bf16(sums[r][1], second, x);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int half = 0; half < 2; half++) write(op, row + r, tile, half, sums[r][half]);
}

template <int TYPE> void multiply_rows(const Dense& op, const Source& x, int64_t first, int64_t stop, int64_t tile) {
  RowBlocks::for_each(first, stop, [&](auto rows, int64_t row) {
    constexpr int R = decltype(rows)::value, H = HALVES<R>;
    // With float32 weights, prefetching makes a single row slower (docs/log.md).
    const int64_t ahead = TYPE == FLOAT32 && R == 1 ? 0 : prefetch_from_two_rows(op.m, row == first);
    for (int half = 0; half < 2; half += H) multiply<TYPE, R, H>(op, x, row, tile, half, ahead);
  });
}

void multiply_rows_bf16(const Dense& op, int64_t first, int64_t stop, int64_t tile) {
  RowBlocks::for_each(first, stop, [&](auto rows, int64_t row) {
    multiply_bf16<decltype(rows)::value>(op, row, tile, prefetch_from_two_rows(op.m, row == first));
  });
}

// Returns product ``number`` of the batch as a single product.
Dense product(const Dense& op, int64_t number) {
  const int64_t tiles = ceil_div(op.n, TILE), size = op.weight_type == FLOAT32 ? 4 : 2;
  const int64_t k = op.weight_type == BFLOAT16 ? round_up(op.k, 2) : op.k;
  Dense one = op;
  one.x = (const uint8_t*)op.x + number * op.x_batch_stride * (op.x_type == FLOAT32 ? 4 : 2);
  one.y = (uint8_t*)op.y + number * op.y_batch_stride * (op.y_type == FLOAT32 ? 4 : 2);
  one.tiles = (const uint8_t*)op.tiles + number * tiles * k * TILE * size;
  if (op.bias) one.bias = op.bias + number * tiles * TILE;
  return one;
}

// Floats per row of one product in the scratch memory.
int64_t scratch_floats(const Dense& op) { return round_up(op.k, 16); }

bool uses_bf16_products(const Dense& op) {
  return op.weight_type == BFLOAT16 && op.x_type == BFLOAT16 && op.k % 2 == 0 && use_bf16_products;
}

// Whether rows are first converted to float32.
bool is_converted(const Dense& op) {
  return !uses_bf16_products(op) && (op.x_type != FLOAT32 || (op.k % 2 && op.weight_type == BFLOAT16));
}

// Converts what one product of the batch reads of a row.
void convert_row(const Dense& op, int64_t item) {
  const int64_t row = item / op.batch, number = item % op.batch, floats = scratch_floats(op);
  float* to = (float*)op.scratch + row * op.batch * floats + number * floats;
  const int64_t from = row * op.x_stride + number * op.x_batch_stride;
  for (int64_t i = 0; i < op.k; i += 16)
    store_partial(to, i, FLOAT32, load_partial(op.x, from + i, op.x_type, op.k - i), op.k - i);
  if (op.k % 2) to[op.k] = 0;
}

// The items of all products of the batch, side by side.
TileItems items_of(const Dense& op) {
  TileItems items = tile_items(op, (int64_t)op.k * (uses_bf16_products(op) ? 2 : 4), RowBlocks::max);
  items.tiles *= op.batch;
  return items;
}

// Multiplies rows with a tile of the products side by side.
INLINE void multiply_tile(const Dense& op, int64_t first, int64_t stop, int64_t tile) {
  const int64_t tiles = ceil_div(op.n, TILE), number = tile / tiles;
  const Dense one = product(op, number);
  tile %= tiles;
  if (uses_bf16_products(op)) return multiply_rows_bf16(one, first, stop, tile);
  const int64_t floats = scratch_floats(op);
  const Source x = is_converted(op) ? Source{(const float*)op.scratch + number * floats, op.batch * floats}
                                    : Source{(const float*)one.x, op.x_stride};
  if (op.weight_type == FLOAT32) multiply_rows<FLOAT32>(one, x, first, stop, tile);
  if (op.weight_type == FLOAT16) multiply_rows<FLOAT16>(one, x, first, stop, tile);
  if (op.weight_type == BFLOAT16) multiply_rows<BFLOAT16>(one, x, first, stop, tile);
}

}  // namespace

int64_t scratch_bytes(const Dense& op) { return op.batch * scratch_floats(op) * 4; }

int64_t packing_items(const Dense& op) { return is_converted(op) ? (int64_t)op.m * op.batch : 0; }
void pack_item(const Dense& op, int64_t item) { convert_row(op, item); }
int64_t product_items(const Dense& op) { return items_of(op).count(); }
void product_item(const Dense& op, int64_t item) {
  items_of(op).run(item, [&](int64_t first, int64_t stop, int64_t tile) { multiply_tile(op, first, stop, tile); });
}

void dense(const Dense& op, Worker& worker) {
  if (is_converted(op)) parallel_for(worker, packing_items(op), 1, [&](int64_t item) { convert_row(op, item); });
  parallel_for_tiles(worker, items_of(op),
                     [&](int64_t first, int64_t stop, int64_t tile) { multiply_tile(op, first, stop, tile); });
}

}  // namespace ISA
}  // namespace aiakq
