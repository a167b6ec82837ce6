// Keys and values of a tile of queries, a chunk of positions at a time, from the paged cache into floats.

#pragma once

#include "elements.h"
#include "ops.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int CHUNK = 128;

// Rows, and vectors of scores, worked on side by side: as many as the registers hold sums for.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 6, WIDE = 4;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 2, WIDE = 2;
#else
constexpr int MOST_ROWS = 1, WIDE = 2;
#endif

INLINE int64_t rounded(int64_t x, int64_t multiple) { return pieces(x, multiple) * multiple; }

// A tile of one sequence.
struct Tile {
  int64_t sequence, token;      // its first query token, counted from the beginning of the step
  int64_t rows, group, window;  // window: no smaller than any position where there is none
  int64_t position;             // of its first token
  int64_t begin, end;           // positions that one of its rows sees

  // Positions of a chunk, counted from its start, that a row sees.
  int from(int64_t row, int64_t chunk) const {
    return (int)least(CHUNK, most(0, position + row / group - window + 1 - chunk));
  }
  int to(int64_t row, int64_t chunk) const {
    return (int)least(CHUNK, most(0, position + row / group + 1 - chunk));
  }
};

// The positions of one chunk that are read: which rows of the cache, seen as [pages * P * Hkv, D], they are.
struct Places {
  int from, to;
  int64_t rows[CHUNK];

  Places(const Attention& a, const Tile& tile, int64_t head, int64_t chunk)
      : from((int)least(CHUNK, most(0, tile.begin - chunk))), to((int)least(CHUNK, most(0, tile.end - chunk))) {
    const int32_t* table = a.step->page_table + tile.sequence * a.step->max_pages;
    for (int i = from; i < to;) {
      const int64_t page = (chunk + i) / a.page_size, offset = (chunk + i) % a.page_size;
      const int64_t base = table[page] * (int64_t)a.page_size + offset - i;
      const int end = (int)least(to, i + a.page_size - offset);
      for (; i < end; i++) rows[i] = (base + i) * a.kv_heads + head;
    }
  }
};

// Have a row brought near: memory is slow to answer, and rows of a head are apart.
INLINE void expect(const void* cache, const float* scales, int64_t row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const uint8_t*)cache + row * bytes + i, 0, 2);
  if (scales) __builtin_prefetch(scales + row, 0, 2);
}

// Elements ``d`` to ``end``, but sixteen at most, of a row of a cache; the other lanes are 0.
template <int TYPE>
INLINE F cached(const void* cache, const float* scales, int64_t row, int64_t d, int64_t end, int64_t size) {
  const F value = load_some(cache, row * size + d, TYPE, end - d);
  return TYPE == INT8 ? value * splat(scales[row]) : value;
}

// Keys, one position per lane; up to a multiple of ``WIDE`` vectors lanes of other positions are 0. The same positions'
// values are read next.
template <int TYPE> void load_keys(const Attention& a, const Places& here, float* keys) {
  const int64_t size = a.head_size;
  const int from = here.from, to = here.to;
  const int64_t* rows = here.rows;
  for (int at = from / (16 * WIDE) * (16 * WIDE); at < rounded(to, 16 * WIDE); at += 16) {
    for (int i = (int)most(at, from); i < least(to, at + 16); i++)
      expect(a.v_cache, a.v_scales, rows[i], size * bytes_of(TYPE));
    const bool whole = at >= from && at + 16 <= to;
    for (int64_t d = 0; d < size; d += 16) {
      F block[16];
      if (whole && d + 16 <= size) {
        UNROLL for (int i = 0; i < 16; i++)
          block[i] = cached<TYPE>(a.k_cache, a.k_scales, rows[at + i], d, d + 16, size);
      } else {
        for (int i = 0; i < 16; i++)
          block[i] = at + i < from || at + i >= to ? splat(0)
                                                   : cached<TYPE>(a.k_cache, a.k_scales, rows[at + i], d, size, size);
      }
      transpose(block);
      UNROLL for (int i = 0; i < 16; i++) store(keys + (d + i) * CHUNK + at, block[i]);
    }
  }
}

// Values, one position per row; the keys of the positions ``after`` are read next.
template <int TYPE> void load_values(const Attention& a, const Places& here, const Places& after, float* values) {
  const int64_t size = a.head_size, width = rounded(size, 16);
  for (int at = here.from; at < here.to; at++) {
    if (at >= after.from && at < after.to) expect(a.k_cache, a.k_scales, after.rows[at], size * bytes_of(TYPE));
    for (int64_t d = 0; d < size; d += 16)
      store(values + at * width + d, cached<TYPE>(a.v_cache, a.v_scales, here.rows[at], d, size, size));
  }
}

struct Loading {
  void (*keys)(const Attention&, const Places& here, float* keys);
  void (*values)(const Attention&, const Places& here, const Places& after, float* values);
};

Loading loading_of(int32_t type) {
  switch (type) {
    case FLOAT32: return {load_keys<FLOAT32>, load_values<FLOAT32>};
    case FLOAT16: return {load_keys<FLOAT16>, load_values<FLOAT16>};
    case BFLOAT16: return {load_keys<BFLOAT16>, load_values<BFLOAT16>};
    default: return {load_keys<INT8>, load_values<INT8>};
  }
}

}  // namespace
}  // namespace ISA
}  // namespace aiakq
