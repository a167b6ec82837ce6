// What products have in common, whatever their weights are: tiles of 32 outputs, and rows that go by in lots.

#pragma once

#include "elements.h"
#include "team.h"

namespace aiakq {
namespace ISA {

constexpr int TILE = 32;

// A number that is known to the compiler, as an argument.
template <int V> struct Number {
  static constexpr int value = V;
};

// Bytes of activations that stay in a core's second cache while all tiles go by.
constexpr int64_t NEAR = 1 << 19;

// Asks for the 64 bytes at an address before they are needed.
INLINE void ask_for(const uint8_t* at) { __builtin_prefetch(at, 0, 2); }

// How far ahead to ask for weights when ``first`` rows of ``m`` go by, or 0. Rows are worked on for so long that weights
// must be on their way meanwhile. Cores with 512 bits keep up by themselves where rows are few; see docs/log.md.
INLINE int64_t ahead_of(int64_t m, bool first) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return !first ? 0 : m < 4 ? 1536 : 4096;
#else
  return first && m > 4 ? 4096 : 0;
#endif
}

// y = value (+ bias) (+ residual) for half a tile of one row.
template <class Product> INLINE void write(const Product& a, int64_t row, int64_t tile, int half, F value) {
  const int64_t column = tile * TILE + half * 16, left = a.n - column;
  if (left <= 0) return;
  if (a.bias) value = value + load(a.bias + column);
  if (a.residual) value = value + load_some(a.residual, row * a.residual_stride + column, a.y_type, left);
  store_some(a.y, row * a.y_stride + column, a.y_type, value, left);
}

// work(row, stop, tile) for every tile and lot of rows. ``row_bytes`` are read of each row; a lot is a multiple of the
// ``side_by_side`` that are worked on at a time.
template <class Product, class Work>
INLINE void share_tiles(Team& team, const Product& a, int64_t row_bytes, int64_t side_by_side, Work work) {
  const int64_t m = a.op.m, tiles = pieces(a.n, TILE);
  const int64_t lot = most(4, NEAR / (row_bytes * side_by_side)) * side_by_side, items = tiles * pieces(m, lot);
  share(team, items, chunk_of(team, items, 8), [&](int64_t item) {
    const int64_t first = item / tiles * lot;
    work(first, least(m, first + lot), item % tiles);
  });
}

}  // namespace ISA
}  // namespace aiakq
