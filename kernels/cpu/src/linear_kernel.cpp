// y = x W^T with quantized weights: selects the code for a product (linear_product.h), and has that of ROWS.

#include "kernels.h"
#include "linear_product.h"
#include "product_items.h"

namespace aiakq {
namespace ISA {
namespace {

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

void multiply_rows(const Linear& op, int64_t first, int64_t stop, int64_t tile) {
  IntegerPanels::for_each(first, stop, [&](auto rows, int64_t row) {
    multiply_integers_of_tile<decltype(rows)::value>(op, row, tile, prefetch_distance(op.m, row == first));
  });
}

Product product_of(const Linear& op) {
  switch (op.math) {
    case EXACT: return exact_product(op);
    case BLOCKS: return blocks_product(op);
    case E4M3:
    case E5M2: return float_product(op);
    case ROWS: return {pack<IntegerPanels>, multiply_rows};
    default: return table_product(op);
  }
}

// A panel is packed by one thread and never split by the blocks of rows: both hold multiples of MAX_ROWS.
void pack_rows(const Linear& op, const Product& product, int64_t item) {
  const int64_t first = item * MAX_ROWS;
  product.pack(op, first, min(op.m, first + MAX_ROWS));
}

TileItems items_of(const Linear& op) { return tile_items(op, 4 * words_of(op).values, MAX_ROWS); }

}  // namespace

int64_t scratch_bytes(const Linear& op) {
  const RowWords words = words_of(op);
  return 4 * (words.values + words.scales + words.sums + words.rounded);
}

int64_t packing_items(const Linear& op) { return ceil_div(op.m, MAX_ROWS); }
void pack_item(const Linear& op, int64_t item) { pack_rows(op, product_of(op), item); }
int64_t product_items(const Linear& op) { return items_of(op).count(); }
void product_item(const Linear& op, int64_t item) {
  const Product product = product_of(op);
  items_of(op).run(item, [&](int64_t first, int64_t stop, int64_t tile) { product.multiply(op, first, stop, tile); });
}

void linear(const Linear& op, Worker& worker) {
  const Product product = product_of(op);
  parallel_for(worker, packing_items(op), 1, [&](int64_t item) { pack_rows(op, product, item); });
  parallel_for_tiles(worker, items_of(op),
                     [&](int64_t first, int64_t stop, int64_t tile) { product.multiply(op, first, stop, tile); });
}

}  // namespace ISA
}  // namespace aiakq
