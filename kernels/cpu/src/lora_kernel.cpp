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
constexpr int MAX_TILES = 4;
#elif defined(__AVX2__)
using DotRows = Blocks<1>;
using TileRows = Blocks<2, 1>;
constexpr int MAX_TILES = 2;
#else
using DotRows = Blocks<1>;
using TileRows = Blocks<1>;
constexpr int MAX_TILES = 1;
#endif
constexpr int RANKS = 4;
// Tiles of B in an item, which are computed together for few rows, because the sums of one are too short a chain.
constexpr int TILES = 4;
// Rows of an item of A x.
constexpr int64_t ROWS_OF_ITEM = 32;

// Bytes that are prefetched ahead: the processor's own prefetching ends with the page, and most adapters are that short.
constexpr int64_t PREFETCH_A = 4096, PREFETCH_B = 4096;

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

// C ranks of A x for R rows. A is read as one stream, prefetched ``ahead`` bytes ahead unless that is 0.
template <int TYPE, int R, int C>
void multiply_a(const Lora& op, const LoraWeights& weights, const Block& block, int64_t first_rank, int64_t ahead) {
  constexpr int64_t BYTES = TYPE == FLOAT32 ? 64 : 32;
  const int64_t k = round_up(op.k, 16);
  const uint8_t* a = (const uint8_t*)weights.a + first_rank * (k / 16 * BYTES);
  F sums[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) sums[r][c] = splat(0);
  for (int64_t i = 0; i < k; i += 16, a += C * BYTES) {
    if (ahead) UNROLL for (int64_t at = 0; at < C * BYTES; at += 64) prefetch(a + ahead + at);
    F w[C];
    UNROLL for (int c = 0; c < C; c++) w[c] = load_as_float(a + c * BYTES, 0, TYPE);
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
      multiply_a<TYPE, R, decltype(ranks)::value>(op, weights, block, first, row == 0 ? PREFETCH_A : 0);
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

// T tiles of B times what A made of R rows.
template <int TYPE, int R, int T>
void multiply_b(const Lora& op, const LoraPart& part, const Block& block, int64_t tile, int64_t ahead) {
  constexpr int64_t BYTES = TILE * (TYPE == FLOAT32 ? 4 : 2);
  const int64_t stride = part.rank * BYTES;
  const uint8_t* b = (const uint8_t*)part.b + tile * stride;
  F sums[R][T][2];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int t = 0; t < T; t++) sums[r][t][0] = sums[r][t][1] = splat(0);
  for (int64_t i = 0; i < part.rank; i++, b += BYTES) {
    F x[R];
    UNROLL for (int r = 0; r < R; r++) x[r] = splat(block.inner[r][part.first_rank + i]);
    UNROLL for (int t = 0; t < T; t++) {
      const uint8_t* at = b + t * stride;
      if (ahead) UNROLL for (int64_t line = 0; line < BYTES; line += 64) prefetch(at + ahead + line);
      const F low = load_as_float(at, 0, TYPE), high = load_as_float(at, 16, TYPE);
      UNROLL for (int r = 0; r < R; r++) {
        sums[r][t][0] = fma(low, x[r], sums[r][t][0]);
        sums[r][t][1] = fma(high, x[r], sums[r][t][1]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int t = 0; t < T; t++)
      UNROLL for (int half = 0; half < 2; half++)
        add(op, part, block.row[r], (tile + t) * TILE + half * 16, sums[r][t][half]);
}

// The tiles of one part from ``first`` to ``stop``.
template <int TYPE>
void multiply_b_rows(const Lora& op, const LoraPart& part, const int32_t* rows, int64_t count, int64_t first,
                     int64_t stop) {
  TileRows::for_each(0, count, [&](auto size, int64_t row) {
    constexpr int R = decltype(size)::value;
    const Block block = block_of<R>(op, rows + row);
    constexpr int LIMIT = R < MAX_TILES ? MAX_TILES / R : 1;
    Blocks<4, 2, 1>::for_each<LIMIT>(first, stop, [&](auto tiles, int64_t tile) {
      multiply_b<TYPE, R, decltype(tiles)::value>(op, part, block, tile, row == 0 ? PREFETCH_B : 0);
    });
  });
}

// Calls work(part, first tile of it, last + 1) for the parts of the tiles ``first`` to ``stop`` of all parts together.
template <class Work> INLINE void for_parts(const LoraWeights& weights, int64_t first, int64_t stop, Work work) {
  for (const LoraPart* part = weights.part; first < stop; part++) {
    const int64_t tiles = ceil_div(part->n, TILE);
    if (first < tiles) {
      work(*part, first, min(stop, tiles));
      first = tiles;
    }
    first -= tiles;
    stop -= tiles;
  }
}

// work(weights, its rows, number of rows, number of the item in the segment) for all items of all segments, of which
// items(weights, number of rows) says how many a segment has.
template <class Items, class Work>
INLINE void parallel_for_segments(Worker& worker, const Lora& op, int64_t max_chunk, Items items, Work work) {
  const LoraSegments& segments = *op.segments;
  const auto weights_of = [&](int64_t s) -> const LoraWeights& { return op.weights[segments.slots[s]]; };
  const auto rows_of = [&](int64_t s) { return (int64_t)(segments.starts[s + 1] - segments.starts[s]); };
  int64_t total = 0;
  for (int64_t s = 0; s < segments.count; s++) total += items(weights_of(s), rows_of(s));
  // The items that a thread takes ascend.
  int64_t s = -1, first = 0, stop = 0;
  parallel_for(worker, total, chunk_size(worker, total, max_chunk), [&](int64_t item) {
    while (item >= stop) {
      s++;
      first = stop;
      stop += items(weights_of(s), rows_of(s));
    }
    work(weights_of(s), segments.rows + segments.starts[s], rows_of(s), item - first);
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
      worker, op, 4, [](const LoraWeights& weights, int64_t) { return ceil_div((int64_t)weights.tiles, TILES); },
      [&](const LoraWeights& weights, const int32_t* rows, int64_t count, int64_t item) {
        const int64_t tile = item * TILES;
        for_parts(weights, tile, min(weights.tiles, tile + TILES), [&](const LoraPart& part, int64_t from, int64_t to) {
          if (weights.type == FLOAT32) multiply_b_rows<FLOAT32>(op, part, rows, count, from, to);
          if (weights.type == FLOAT16) multiply_b_rows<FLOAT16>(op, part, rows, count, from, to);
          if (weights.type == BFLOAT16) multiply_b_rows<BFLOAT16>(op, part, rows, count, from, to);
        });
      });
}

}  // namespace ISA
}  // namespace aiakq
