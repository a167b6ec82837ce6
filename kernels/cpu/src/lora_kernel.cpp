// What LoRA adapters add to the outputs of a linear layer, each to rows of its own.
//
// First A x for every row, then B of that. A sum is over sixteen lanes of inputs, or over the ranks one after the other,
// in float32, whatever the other rows are. Without a row that has an adapter nothing is done.

#include "kernels.h"
#include "tiles.h"

namespace aiakq {
namespace ISA {
namespace {

// Rows that are computed together: as many as the registers hold sums for, of RANKS rows of A or of a tile of B.
#if defined(__AVX512F__)
using DotRows = Blocks<4, 2, 1>;
using TileRows = Blocks<8, 4, 2, 1>;
#elif defined(__AVX2__)
using DotRows = Blocks<1>;
using TileRows = Blocks<2, 1>;
#else
using DotRows = Blocks<1>;
using TileRows = Blocks<1>;
#endif
constexpr int RANKS = 4;
// Rows of an item of A x.
constexpr int64_t ROWS_OF_ITEM = 32;

INLINE int64_t element_bytes(int32_t type) { return type == FLOAT32 ? 4 : 2; }

// The scratch memory of a row: its activations in float32, then what A makes of them.
INLINE int64_t scratch_floats(const Lora& op) { return round_up(op.k, 16) + round_up(op.max_rank, 16); }
INLINE float* row_scratch(const Lora& op, int64_t row) { return (float*)op.scratch + row * scratch_floats(op); }

// Rows of a segment, as many as a block has, as floats.
struct Block {
  const float* x[8];
  float* inner[8];
  int64_t row[8];
};

template <int R> INLINE Block block_of(const Lora& op, const int32_t* rows) {
  Block block;
  for (int r = 0; r < R; r++) {
    block.row[r] = rows[r];
    block.x[r] = row_scratch(op, rows[r]);
    block.inner[r] = row_scratch(op, rows[r]) + round_up(op.k, 16);
  }
  return block;
}

// C ranks of A x for R rows.
template <int TYPE, int R, int C>
void multiply_a(const Lora& op, const LoraWeights& weights, const Block& block, int64_t first_rank) {
  const int64_t k = round_up(op.k, 16), bytes = k * element_bytes(TYPE);
  const uint8_t* a = (const uint8_t*)weights.a + first_rank * bytes;
  F sums[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) sums[r][c] = splat(0);
  for (int64_t i = 0; i < k; i += 16) {
    F w[C];
    UNROLL for (int c = 0; c < C; c++) w[c] = load_as_float(a + c * bytes, i, TYPE);
    UNROLL for (int r = 0; r < R; r++) {
      const F x = load(block.x[r] + i);
      UNROLL for (int c = 0; c < C; c++) sums[r][c] = fma(w[c], x, sums[r][c]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++)
      block.inner[r][first_rank + c] = reduce_add(sums[r][c]) * weights.scales[first_rank + c];
}

template <int TYPE>
void multiply_a_rows(const Lora& op, const LoraWeights& weights, const int32_t* rows, int64_t count, int64_t rank) {
  DotRows::for_each(0, count, [&](auto size, int64_t row) {
    constexpr int R = decltype(size)::value;
    const Block block = block_of<R>(op, rows + row);
    Blocks<RANKS, 2, 1>::for_each(rank, min(weights.rank, rank + RANKS), [&](auto ranks, int64_t first) {
      multiply_a<TYPE, R, decltype(ranks)::value>(op, weights, block, first);
    });
  });
}

// y for half a tile of one row.
INLINE void add(const Lora& op, const LoraPart& part, int64_t row, int64_t column, F value) {
  const int64_t count = part.n - column, at = row * op.y_stride + part.first + column;
  if (count <= 0) return;
  if (part.bias) value = value + load(part.bias + column);
  F y = load_partial(op.y, at, op.y_type, count);
  if (part.factors) {
    const F factor = load(part.factors + column);
    F product = y;
    if (op.base_bias) product = y - load_partial(op.base_bias, part.first + column, FLOAT32, count);
    y = fma(factor, product, y);
    value = fma(factor, value, value);
  }
  store_partial(op.y, at, op.y_type, y + value, count);
}

// A tile of B times what A made of R rows.
template <int TYPE, int R> void multiply_b(const Lora& op, const LoraPart& part, const Block& block, int64_t tile) {
  const uint8_t* b = (const uint8_t*)part.b + tile * part.rank * TILE * element_bytes(TYPE);
  F sums[R][2];
  UNROLL for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = splat(0);
  for (int64_t i = 0; i < part.rank; i++) {
    const F low = load_as_float(b, i * TILE, TYPE), high = load_as_float(b, i * TILE + 16, TYPE);
    UNROLL for (int r = 0; r < R; r++) {
      const F x = splat(block.inner[r][part.first_rank + i]);
      sums[r][0] = fma(low, x, sums[r][0]);
      sums[r][1] = fma(high, x, sums[r][1]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    for (int half = 0; half < 2; half++) add(op, part, block.row[r], tile * TILE + half * 16, sums[r][half]);
}

template <int TYPE>
void multiply_b_rows(const Lora& op, const LoraPart& part, const int32_t* rows, int64_t count, int64_t tile) {
  TileRows::for_each(0, count, [&](auto size, int64_t row) {
    constexpr int R = decltype(size)::value;
    multiply_b<TYPE, R>(op, part, block_of<R>(op, rows + row), tile);
  });
}

// work(weights, its rows, number of rows, number of the item in the segment) for all items of all segments, of which
// items(weights, number of rows) says how many a segment has.
template <class Items, class Work>
INLINE void parallel_for_segments(Worker& worker, const Lora& op, int64_t max_chunk, Items items, Work work) {
  const LoraSegments& segments = *op.segments;
  const auto rows_of = [&](int64_t s) { return (int64_t)(segments.starts[s + 1] - segments.starts[s]); };
  int64_t total = 0;
  for (int64_t s = 0; s < segments.count; s++) total += items(op.weights[segments.slots[s]], rows_of(s));
  parallel_for(worker, total, chunk_size(worker, total, max_chunk), [&](int64_t item) {
    int64_t s = 0;
    for (int64_t own; item >= (own = items(op.weights[segments.slots[s]], rows_of(s))); s++) item -= own;
    work(op.weights[segments.slots[s]], segments.rows + segments.starts[s], rows_of(s), item);
  });
}

}  // namespace

int64_t scratch_bytes(const Lora& op) { return scratch_floats(op) * 4; }

void lora(const Lora& op, Worker& worker) {
  const LoraSegments& segments = *op.segments;
  if (segments.count == 0) return;
  parallel_for(worker, segments.starts[segments.count], 1, [&](int64_t item) {
    const int64_t row = segments.rows[item];
    float* to = row_scratch(op, row);
    for (int64_t i = 0; i < op.k; i += 16)
      store(to + i, load_partial(op.x, row * op.x_stride + i, op.x_type, op.k - i));
  });
  parallel_for_segments(
      worker, op, 4,
      [](const LoraWeights& weights, int64_t rows) {
        return ceil_div(weights.rank, RANKS) * ceil_div(rows, ROWS_OF_ITEM);
      },
      [&](const LoraWeights& weights, const int32_t* rows, int64_t count, int64_t item) {
        const int64_t across = ceil_div(weights.rank, RANKS), first = item / across * ROWS_OF_ITEM;
        const int64_t rank = item % across * RANKS, own = min(ROWS_OF_ITEM, count - first);
        if (weights.type == FLOAT32) multiply_a_rows<FLOAT32>(op, weights, rows + first, own, rank);
        if (weights.type == FLOAT16) multiply_a_rows<FLOAT16>(op, weights, rows + first, own, rank);
        if (weights.type == BFLOAT16) multiply_a_rows<BFLOAT16>(op, weights, rows + first, own, rank);
      });
  parallel_for_segments(
      worker, op, 16, [](const LoraWeights& weights, int64_t) { return (int64_t)weights.tiles; },
      [&](const LoraWeights& weights, const int32_t* rows, int64_t count, int64_t tile) {
        const LoraPart* part = weights.part;
        for (int64_t own; tile >= (own = ceil_div(part->n, TILE)); part++) tile -= own;
        if (weights.type == FLOAT32) multiply_b_rows<FLOAT32>(op, *part, rows, count, tile);
        if (weights.type == FLOAT16) multiply_b_rows<FLOAT16>(op, *part, rows, count, tile);
        if (weights.type == BFLOAT16) multiply_b_rows<BFLOAT16>(op, *part, rows, count, tile);
      });
}

}  // namespace ISA
}  // namespace aiakq
