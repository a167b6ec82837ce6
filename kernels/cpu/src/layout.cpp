// Packs weights, once at load time, into the layouts that linear_kernel.cpp and dense_kernel.cpp read.

#include "layout.h"

#include <cstdint>
#include <cstring>

#include "common.h"
#include "ops.h"

using namespace aiakq;

namespace {

// Writes code ``c`` as byte ``at`` of operand ``o`` of a half block.
void put(uint8_t* at, int bits, int o, uint8_t c) {
  switch (bits) {
    case 8: at[VECTOR_STRIDE * o] = c; break;
    case 4: at[VECTOR_STRIDE * (o / 2)] |= (uint8_t)(c << (o % 2 * 4)); break;
    case 2: at[VECTOR_STRIDE * (o / 4)] |= (uint8_t)(c << (o % 4 * 2)); break;
    case 5:
      at[VECTOR_STRIDE * (o / 2)] |= (uint8_t)((c & 15) << (o % 2 * 4));
      at[VECTOR_STRIDE * 4] |= (uint8_t)(c >> 4 << o);
      break;
    case 6:
      at[VECTOR_STRIDE * (o / 2)] |= (uint8_t)((c & 15) << (o % 2 * 4));
      at[VECTOR_STRIDE * (4 + o / 4)] |= (uint8_t)(c >> 4 << (o % 4 * 2));
      break;
    default:
      at[VECTOR_STRIDE * (o / 4)] |= (uint8_t)((c & 3) << (o % 4 * 2));
      at[VECTOR_STRIDE * 2] |= (uint8_t)(c >> 2 << o);
  }
}

// Four codes of a block, those of operand ``o``, as the bytes of a word.
inline uint32_t four(const uint8_t* codes, int o) {
  uint32_t word;
  memcpy(&word, codes + 4 * o, 4);
  return word;
}

// The bits of ``mask`` of operands ``first`` to ``first`` + ``count`` - 1, each ``step`` bits further left.
inline uint32_t merged(const uint8_t* codes, int first, int count, int step, int right, uint32_t mask) {
  uint32_t word = 0;
  for (int i = 0; i < count; i++) word |= (four(codes, first + i) >> right & mask) << i * step;
  return word;
}

// Writes the 32 codes of one output in a block, as ``put`` does for each.
template <int BITS> void put_block(uint8_t* to, const uint8_t* codes) {
  const auto write = [&](int vector, uint32_t word) { memcpy(to + VECTOR_STRIDE * vector, &word, 4); };
  if (BITS == 8)
    for (int o = 0; o < 8; o++) write(o, four(codes, o));
  if (BITS == 2 || BITS == 3)
    for (int vector = 0; vector < 2; vector++) write(vector, merged(codes, 4 * vector, 4, 2, 0, 0x03030303));
  if (BITS == 3) write(2, merged(codes, 0, 8, 1, 2, 0x01010101));
  if (BITS >= 4 && BITS <= 6)
    for (int vector = 0; vector < 4; vector++) write(vector, merged(codes, 2 * vector, 2, 4, 0, 0x0f0f0f0f));
  if (BITS == 5) write(4, merged(codes, 0, 8, 1, 4, 0x01010101));
  if (BITS == 6)
    for (int vector = 0; vector < 2; vector++) write(4 + vector, merged(codes, 4 * vector, 4, 2, 4, 0x03030303));
}

void put_block(uint8_t* to, int bits, const uint8_t* codes) {
  switch (bits) {
    case 2: return put_block<2>(to, codes);
    case 3: return put_block<3>(to, codes);
    case 4: return put_block<4>(to, codes);
    case 5: return put_block<5>(to, codes);
    case 6: return put_block<6>(to, codes);
    default: return put_block<8>(to, codes);
  }
}

// Whether a block holds consecutive columns.
bool is_consecutive(const int32_t* places) {
  for (int i = 0; i < BLOCK; i++)
    if (places[i] != places[0] + i) return false;
  return places[0] >= 0;
}

// Elements of 4 bytes [rows, K] -> [K, TILE], a few inputs at a time so that what is written stays in the cache.
void transpose_words(const uint8_t* from, int64_t stride, int64_t rows, int64_t k, uint8_t* out) {
  for (int64_t start = 0; start < k; start += 64)
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = start; i < min(start + 64, k); i++)
        memcpy(out + (i * TILE + row) * 4, from + row * stride + i * 4, 4);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// codes [N, K] uint8 -> tiles [ceil(N / 32), blocks, bits, 2, 64] bytes. ``columns`` [blocks * 32] holds the column at
// each position of a tile, -1 for padding. ``math`` is the LinearMath.
void aiakq_pack_codes(const uint8_t* codes, int64_t n, int64_t k, int32_t bits, int32_t math, const int32_t* columns,
                      int64_t blocks, uint8_t* tiles, int32_t threads) {
  const int64_t block_bytes = VECTOR_STRIDE * bits, count = ceil_div(n, TILE);
  const int adjacent = adjacent_inputs(math);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t tile = 0; tile < count; tile++) {
    uint8_t* out = tiles + tile * blocks * block_bytes;
    memset(out, 0, blocks * block_bytes);
    for (int64_t row = 0; row < TILE && tile * TILE + row < n; row++) {
      const uint8_t* from = codes + (tile * TILE + row) * k;
      const int lane = (int)(row % 16);
      for (int64_t block = 0; block < blocks; block++) {
        uint8_t* to = out + block * block_bytes + row / 16 * 64;
        const int32_t* places = columns + block * BLOCK;
        if (adjacent == 4 && is_consecutive(places)) {
          put_block(to + 4 * lane, bits, from + places[0]);
          continue;
        }
        for (int i = 0; i < BLOCK; i++)
          if (places[i] >= 0) put(to + place_in_vector(adjacent, lane, i % 4), bits, i / 4, from[places[i]]);
      }
    }
  }
}

// weight [N, K], elements of 4 or 2 bytes -> tiles [ceil(N / 32), K, 32], or in pairs of inputs
// [ceil(N / 32), ceil(K / 2), 32, 2]; padding is 0.
void aiakq_pack_floats(const void* weight, int64_t n, int64_t k, int32_t size, bool pairs, void* tiles,
                       int32_t threads) {
  const int64_t padded = pairs ? k + k % 2 : k, count = ceil_div(n, TILE);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t tile = 0; tile < count; tile++) {
    uint8_t* out = (uint8_t*)tiles + tile * padded * TILE * size;
    memset(out, 0, padded * TILE * size);
    if (size == 4 || (pairs && k % 2 == 0)) {
      const uint8_t* first = (const uint8_t*)weight + tile * TILE * k * size;
      transpose_words(first, k * size, min(TILE, n - tile * TILE), k * size / 4, out);
      continue;
    }
    for (int64_t row = 0; row < TILE && tile * TILE + row < n; row++) {
      const uint8_t* from = (const uint8_t*)weight + (tile * TILE + row) * k * size;
      for (int64_t i = 0; i < k; i++) {
        const int64_t place = pairs ? (i / 2 * TILE + row) * 2 + i % 2 : i * TILE + row;
        memcpy(out + place * size, from + i * size, size);
      }
    }
  }
}

}  // extern "C"
#pragma GCC visibility pop
