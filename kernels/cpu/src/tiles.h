// Shared by products with quantized and floating-point weights: tiles of outputs and blocks of rows.

#pragma once

#include "blocking.h"
#include "elements.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {

// Halves of a tile per register block of R rows, limited by the accumulators that fit into registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <int R> constexpr int HALVES = R > 2 ? 1 : 2;
#else
template <int R> constexpr int HALVES = 2;
#endif

// Bytes of activations that stay in a core's L2 cache while it iterates over all tiles.
constexpr int64_t CACHED_BYTES = 1 << 19;

// Prefetches the cache line at an address.
INLINE void prefetch(const uint8_t* at) { __builtin_prefetch(at, 0, 2); }

// Prefetch distance for weights in bytes, or 0: used while the first block of ``m`` rows is computed, which takes long
// enough for the weights of later inputs to arrive. AVX-512 cores do not need it for few rows; see docs/log.md.
INLINE int64_t prefetch_distance(int64_t m, bool first) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return !first ? 0 : m < 4 ? 1536 : 4096;
#else
  return first && m > 4 ? 4096 : 0;
#endif
}

// y = value (+ bias) for half a tile of one row.
template <class Product> INLINE void write(const Product& op, int64_t row, int64_t tile, int half, F value) {
  const int64_t column = tile * TILE + half * 16, count = op.n - column;
  if (count <= 0) return;
  if (op.bias) value = value + load(op.bias + column);
  store_partial(op.y, row * op.y_stride + column, op.y_type, value, count);
}

// The items of a product: every tile with every block of rows.
struct TileItems {
  int64_t m, m_block, tiles;

  int64_t count() const { return tiles * ceil_div(m, m_block); }

  // Calls work(first row, last row + 1, tile).
  template <class Work> void run(int64_t item, Work work) const {
    const int64_t first = item / tiles * m_block;
    work(first, min(m, first + m_block), item % tiles);
  }
};

// ``row_bytes`` bytes of each row are read per tile. Blocks hold a multiple of ``rows`` rows.
template <class Product> INLINE TileItems tile_items(const Product& op, int64_t row_bytes, int64_t rows) {
  return {op.m, max(4, CACHED_BYTES / (row_bytes * rows)) * rows, ceil_div(op.n, TILE)};
}

// Calls work(first row, last row + 1, tile) for all items.
template <class Work> INLINE void parallel_for_tiles(Worker& worker, const TileItems& items, Work work) {
  const int64_t count = items.count();
  parallel_for(worker, count, chunk_size(worker, count, 8), [&](int64_t item) { items.run(item, work); });
}

}  // namespace ISA
}  // namespace aiakq
