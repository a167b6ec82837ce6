// Access to the paged KV cache: the memory layout of a chunk of positions, and copying it into contiguous floats.

#pragma once

#include "blocking.h"
#include "elements.h"
#include "ops.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int CHUNK = 128;

// Query rows per register block.
#if defined(__AVX2__)
using RowBlocks = Blocks<6, 4, 2, 1>;
#else
using RowBlocks = Blocks<1>;
#endif

// Vectors per register block of ``rows`` rows: as many accumulators as fit into registers, and enough to hide the
// latency of an addition.
constexpr int max_vectors(int rows) {
#if defined(__AVX512F__)
  return rows == 1 ? 8 : 4;
#elif defined(__AVX2__)
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#else
  return 2;
#endif
}

// A tile of query rows of one sequence: tokens times the ``group`` of query heads that share a key-value head.
struct Tile {
  int64_t sequence;
  int64_t token;       // the first one, counted from the beginning of the step
  int64_t rows, group;
  int64_t window;      // larger than any position if there is no window
  int64_t chunk_size;  // likewise
  int64_t position;    // of the first token
  int64_t begin, end;  // the positions that any of its rows attends to
  const int32_t* ends; // of the positions that each token of the step attends to, ascending; null: behind its own

  // Returns the first position that a token attends to.
  int64_t first(int64_t token_position) const {
    return max(0, max(token_position - window + 1, token_position / chunk_size * chunk_size));
  }
  // Returns the end of the positions that a token of the tile attends to.
  int64_t last(int64_t own) const { return ends ? ends[token + own] : position + own + 1; }
  // Returns the positions that a row attends to in the chunk that starts at ``chunk``, relative to it.
  int from(int64_t row, int64_t chunk) const {
    return (int)min(CHUNK, max(0, first(position + row / group) - chunk));
  }
  int to(int64_t row, int64_t chunk) const {
    return (int)min(CHUNK, max(0, last(row / group) - chunk));
  }
};

// Offsets of the positions of one chunk in the cache. Per page and head, keys are [D, P], values [P, value_size],
// latents [P, D], scales [P].
struct ChunkIndex {
  int from, to;           // the positions that are read, counted from the start of the chunk
  int64_t keys[CHUNK];    // first element of a position's key; the stride between elements is P, or 1 for latents
  int64_t values[CHUNK];  // first element of its value
  int64_t scales[CHUNK];

  ChunkIndex(const Attention& op, const Tile& tile, int64_t head, int64_t chunk)
      : from((int)min(CHUNK, max(0, tile.begin - chunk))), to((int)min(CHUNK, max(0, tile.end - chunk))) {
    const int32_t* table = op.step->page_table + tile.sequence * op.step->max_pages;
    // If pages hold whole vectors, read whole vectors.
    for (int i = op.page_size % 16 ? from : from / 16 * 16; i < to;) {
      const int64_t page = (chunk + i) / op.page_size, offset = (chunk + i) % op.page_size;
      const int64_t block = (table[page] * (int64_t)op.kv_heads + head) * op.page_size;
      const int end = (int)min(to, i + op.page_size - offset);
      for (int64_t at = offset; i < end; i++, at++) {
        keys[i] = op.v_cache ? block * op.head_size + at : (block + at) * op.head_size;
        values[i] = op.v_cache ? (block + at) * op.value_size : keys[i] + op.head_size - op.value_size;
        scales[i] = block + at;
      }
    }
  }
};

// Keys and values of a chunk, either in the cache or copied into floats.
struct Chunk {
  const void *keys, *values;
  const int64_t *key, *value;  // [CHUNK] the first element of each position's key and value
  int64_t stride;              // from one element of a key to the next
};

// Copies keys into floats [CHUNK / 16, D, 16]. Lanes of positions that are not read are 0.
template <int TYPE> void load_keys(const Attention& op, const ChunkIndex& index, float* keys) {
  const int64_t size = op.head_size, page = op.page_size, bytes = bytes_of(TYPE);
  const uint8_t* cache = (const uint8_t*)op.k_cache;
  for (int at = index.from / 16 * 16; at < index.to; at += 16) {
    float* into = keys + at * size;
    if (page % 16 == 0) {
      for (int64_t d = 0; d < size; d++)
        store(into + d * 16, load_as_float(cache, index.keys[at] + d * page, TYPE));
      continue;
    }
    for (int64_t d = 0; d < size; d++) {
      alignas(64) uint8_t held[64] = {};
      for (int i = (int)max(at, index.from); i < min(index.to, at + 16); i++)
        memcpy(held + (i - at) * bytes, cache + (index.keys[i] + d * page) * bytes, bytes);
      store(into + d * 16, load_as_float(held, 0, TYPE));
    }
  }
}

// Copies latents into the same layout.
template <int TYPE> void load_latents(const Attention& op, const ChunkIndex& index, float* keys) {
  const int64_t size = op.head_size;
  for (int at = index.from / 16 * 16; at < index.to; at += 16) {
    for (int64_t d = 0; d < size; d += 16) {
      alignas(64) float rows[16][16] = {};
      for (int i = max(at, index.from); i < min(index.to, at + 16); i++)
        store(rows[i - at], load_partial(op.k_cache, index.keys[i] + d, TYPE, size - d));
      float* into = keys + at * size + d * 16;
      for (int64_t column = 0; column < min(16, size - d); column++)
        for (int row = 0; row < 16; row++) into[column * 16 + row] = rows[row][column];
    }
  }
}

// Copies values into floats [CHUNK, value_size rounded up to 16].
template <int TYPE> void load_values(const Attention& op, const ChunkIndex& index, float* values) {
  const int64_t size = op.value_size, width = round_up(size, 16);
  const void* cache = op.v_cache ? op.v_cache : op.k_cache;
  for (int at = index.from; at < index.to; at++)
    for (int64_t d = 0; d < size; d += 16)
      store(values + at * width + d, load_partial(cache, index.values[at] + d, TYPE, size - d));
}

// Copies scales [CHUNK]; those of positions that are not read are undefined.
INLINE void load_scales(const Attention& op, const float* scales, const ChunkIndex& index, float* into) {
  if (op.page_size % 16 == 0) {
    for (int at = index.from / 16 * 16; at < index.to; at += 16) store(into + at, load(scales + index.scales[at]));
    return;
  }
  for (int i = index.from; i < index.to; i++) into[i] = scales[index.scales[i]];
}

}  // namespace
}  // namespace ISA
}  // namespace aiakq
