// Where keys and values of a tile of queries are in the paged cache, a chunk of positions at a time, and how they become
// floats beside each other.

#pragma once

#include "elements.h"
#include "ops.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int CHUNK = 128;

// Rows that are worked on side by side.
#if defined(__AVX2__)
constexpr int MOST_ROWS = 6;
#else
constexpr int MOST_ROWS = 1;
#endif

// Vectors that are worked on for each of R rows: as many as there are registers for their sums, and no fewer than it
// takes to begin one sum while others are under way.
constexpr int wide(int rows) {
#if defined(__AVX512F__)
  return rows == 1 ? 8 : 4;
#elif defined(__AVX2__)
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#else
  return 2;
#endif
}

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

// Where the positions of one chunk are that are read. Of a page and a head, keys are [D, P], values [P, D], scales [P].
struct Places {
  int from, to;
  int64_t keys[CHUNK];    // first element of a position's key; the others follow every P
  int64_t values[CHUNK];  // first element of its value
  int64_t scales[CHUNK];  // its scales

  Places(const Attention& a, const Tile& tile, int64_t head, int64_t chunk)
      : from((int)least(CHUNK, most(0, tile.begin - chunk))), to((int)least(CHUNK, most(0, tile.end - chunk))) {
    const int32_t* table = a.step->page_table + tile.sequence * a.step->max_pages;
    // Of pages that hold whole vectors, from the beginning of a vector.
    for (int i = a.page_size % 16 ? from : from / 16 * 16; i < to;) {
      const int64_t page = (chunk + i) / a.page_size, offset = (chunk + i) % a.page_size;
      const int64_t block = (table[page] * (int64_t)a.kv_heads + head) * a.page_size;
      const int end = (int)least(to, i + a.page_size - offset);
      for (int64_t at = offset; i < end; i++, at++) {
        keys[i] = block * a.head_size + at;
        values[i] = (block + at) * a.head_size;
        scales[i] = block + at;
      }
    }
  }
};

// Keys and values of a chunk, as they are read by products: in the cache itself or in floats beside each other.
struct Chunk {
  const void *keys, *values;
  const int64_t *key, *value;  // where a vector of keys and a position's value begin
  int64_t stride;              // from one element of a key to the next
};

// Keys into floats, vector by vector: [CHUNK / 16, D, 16]. Lanes of other positions are 0.
template <int TYPE> void load_keys(const Attention& a, const Places& here, float* keys) {
  const int64_t size = a.head_size, page = a.page_size, bytes = bytes_of(TYPE);
  const uint8_t* cache = (const uint8_t*)a.k_cache;
  for (int at = here.from / 16 * 16; at < here.to; at += 16) {
    float* into = keys + at * size;
    if (page % 16 == 0) {
      for (int64_t d = 0; d < size; d++)
        store(into + d * 16, load_as_float(cache, here.keys[at] + d * page, TYPE));
      continue;
    }
    for (int64_t d = 0; d < size; d++) {
      alignas(64) uint8_t held[64] = {};
      for (int i = (int)most(at, here.from); i < least(here.to, at + 16); i++)
        memcpy(held + (i - at) * bytes, cache + (here.keys[i] + d * page) * bytes, bytes);
      store(into + d * 16, load_as_float(held, 0, TYPE));
    }
  }
}

// Values into floats, position by position: [CHUNK, D rounded up to 16].
template <int TYPE> void load_values(const Attention& a, const Places& here, float* values) {
  const int64_t size = a.head_size, width = rounded(size, 16);
  for (int at = here.from; at < here.to; at++)
    for (int64_t d = 0; d < size; d += 16)
      store(values + at * width + d, load_some(a.v_cache, here.values[at] + d, TYPE, size - d));
}

// The scales of a chunk's positions, [CHUNK]; those of other positions are anything.
INLINE void load_scales(const Attention& a, const float* scales, const Places& here, float* into) {
  if (a.page_size % 16 == 0) {
    for (int at = here.from / 16 * 16; at < here.to; at += 16) store(into + at, load(scales + here.scales[at]));
    return;
  }
  for (int i = here.from; i < here.to; i++) into[i] = scales[here.scales[i]];
}

}  // namespace
}  // namespace ISA
}  // namespace aiakq
