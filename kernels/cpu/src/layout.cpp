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
  UNROLL for (int i = 0; i < count; i++) word |= (four(codes, first + i) >> right & mask) << i * step;
  return word;
}

// Writes the 32 codes of one output in a block, as ``put`` does for each.
template <int BITS> void put_block(uint8_t* to, const uint8_t* codes) {
  const auto write = [&](int vector, uint32_t word) { memcpy(to + VECTOR_STRIDE * vector, &word, 4); };
  if (BITS == 8)
    UNROLL for (int o = 0; o < 8; o++) write(o, four(codes, o));
  if (BITS == 2 || BITS == 3)
    UNROLL for (int vector = 0; vector < 2; vector++) write(vector, merged(codes, 4 * vector, 4, 2, 0, 0x03030303));
  if (BITS == 3) write(2, merged(codes, 0, 8, 1, 2, 0x01010101));
  if (BITS >= 4 && BITS <= 6)
    UNROLL for (int vector = 0; vector < 4; vector++) write(vector, merged(codes, 2 * vector, 2, 4, 0, 0x0f0f0f0f));
  if (BITS == 5) write(4, merged(codes, 0, 8, 1, 4, 0x01010101));
  if (BITS == 6)
    UNROLL for (int vector = 0; vector < 2; vector++) write(4 + vector, merged(codes, 4 * vector, 4, 2, 4, 0x03030303));
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

// --- blocks of GGUF files ---------------------------------------------------------------------------------------------
//
// Facts from ggml-common.h and gguf-py's quants.py; aiakq/formats/gguf/blocks.py says what the fields mean. A kind has
// VALUES inputs of one output in BYTES bytes, codes of BITS bits, and a scale for each GROUP inputs. ``codes`` writes the
// 32 codes of a part, eight in each word. WIDE: scales and offsets are float16 numbers of the block, which are copied;
// otherwise integers of 8 bits, which ``scale`` and ``offset`` return.

constexpr uint64_t EVERY_BYTE = 0x0101010101010101;

inline uint64_t load_eight(const uint8_t* at) {
  uint64_t word;
  memcpy(&word, at, 8);
  return word;
}

// The BITS bits from bit ``shift`` on of the 32 bytes at ``at``, each moved to bit TO of a byte of its own.
template <int BITS, int TO = 0> inline void add_fields(const uint8_t* at, int shift, uint64_t* words) {
  UNROLL for (int i = 0; i < 4; i++)
    words[i] |= (load_eight(at + 8 * i) >> shift & EVERY_BYTE * ((1 << BITS) - 1)) << TO;
}

// 32 codes of 4 bits in 16 bytes: the lower halves of all, then the upper ones.
inline void halves_of_16(const uint8_t* at, uint64_t* words) {
  UNROLL for (int i = 0; i < 4; i++) words[i] = load_eight(at + i % 2 * 8) >> i / 2 * 4 & EVERY_BYTE * 15;
}

// Adds bit i of the 4 bytes at ``at`` to code i as its bit 4.
inline void add_fifth_bits(const uint8_t* at, uint64_t* words) {
  UNROLL for (int i = 0; i < 4; i++) {
    const uint64_t chosen = at[i] * EVERY_BYTE & 0x8040201008040201;
    words[i] |= (chosen + EVERY_BYTE * 0x7f >> 7 & EVERY_BYTE) << 4;
  }
}

struct OfFloats {
  static constexpr bool WIDE = true, HAS_OFFSETS = false;
  static constexpr int VALUES = 32, GROUP = 32, SCALE = 0, OFFSET = 2;
};
struct OfIntegers {
  static constexpr bool WIDE = false, HAS_OFFSETS = false;
  static constexpr int VALUES = 256, GROUP = 32;
  static int8_t offset(const uint8_t*, int) { return 0; }
};

struct Q4_0 : OfFloats {
  static constexpr int BYTES = 18, BITS = 4;
  static void codes(const uint8_t* block, int, uint64_t* words) { halves_of_16(block + 2, words); }
};
struct Q4_1 : OfFloats {
  static constexpr bool HAS_OFFSETS = true;
  static constexpr int BYTES = 20, BITS = 4;
  static void codes(const uint8_t* block, int, uint64_t* words) { halves_of_16(block + 4, words); }
};
struct Q5_0 : OfFloats {
  static constexpr int BYTES = 22, BITS = 5;
  static void codes(const uint8_t* block, int, uint64_t* words) {
    halves_of_16(block + 6, words);
    add_fifth_bits(block + 2, words);
  }
};
struct Q5_1 : OfFloats {
  static constexpr bool HAS_OFFSETS = true;
  static constexpr int BYTES = 24, BITS = 5;
  static void codes(const uint8_t* block, int, uint64_t* words) {
    halves_of_16(block + 8, words);
    add_fifth_bits(block + 4, words);
  }
};
struct Q8_0 : OfFloats {
  static constexpr int BYTES = 34, BITS = 8;
  static void codes(const uint8_t* block, int, uint64_t* words) {
    UNROLL for (int i = 0; i < 4; i++) words[i] = load_eight(block + 2 + 8 * i) ^ EVERY_BYTE * 0x80;
  }
};
struct Q2_K : OfIntegers {
  static constexpr bool HAS_OFFSETS = true;
  static constexpr int BYTES = 84, BITS = 2, GROUP = 16;
  static void codes(const uint8_t* block, int part, uint64_t* words) {
    add_fields<2>(block + 16 + part / 4 * 32, part % 4 * 2, words);
  }
  static int8_t scale(const uint8_t* block, int group) { return block[group] & 15; }
  static int8_t offset(const uint8_t* block, int group) { return block[group] >> 4; }
};
struct Q3_K : OfIntegers {
  static constexpr int BYTES = 110, BITS = 3, GROUP = 16;
  static void codes(const uint8_t* block, int part, uint64_t* words) {
    add_fields<2>(block + 32 + part / 4 * 32, part % 4 * 2, words);
    add_fields<1, 2>(block, part, words);
  }
  static int8_t scale(const uint8_t* block, int group) {
    const uint8_t* packed = block + 96;
    const int low = packed[group % 8] >> group / 8 * 4 & 15, high = packed[8 + group % 4] >> group / 4 * 2 & 3;
    return low + 16 * high - 32;
  }
};

// Scales and minima of 6 bits, 8 of each in 12 bytes.
struct OfSixBits : OfIntegers {
  static constexpr bool HAS_OFFSETS = true;
  static int8_t scale(const uint8_t* block, int group) { return number(block + 4, 0, group); }
  static int8_t offset(const uint8_t* block, int group) { return number(block + 4, 1, group); }
  static int8_t number(const uint8_t* packed, int which, int group) {
    const uint8_t first = packed[4 * which + group % 4];
    if (group < 4) return first & 63;
    return (packed[8 + group % 4] >> 4 * which & 15) + (first >> 6) * 16;
  }
};
struct Q4_K : OfSixBits {
  static constexpr int BYTES = 144, BITS = 4;
  static void codes(const uint8_t* block, int part, uint64_t* words) {
    add_fields<4>(block + 16 + part / 2 * 32, part % 2 * 4, words);
  }
};
struct Q5_K : OfSixBits {
  static constexpr int BYTES = 176, BITS = 5;
  static void codes(const uint8_t* block, int part, uint64_t* words) {
    add_fields<4>(block + 48 + part / 2 * 32, part % 2 * 4, words);
    add_fields<1, 4>(block + 16, part, words);
  }
};
struct Q6_K : OfIntegers {
  static constexpr int BYTES = 210, BITS = 6, GROUP = 16;
  static void codes(const uint8_t* block, int part, uint64_t* words) {
    add_fields<4>(block + part / 4 * 64 + part % 2 * 32, part % 4 / 2 * 4, words);
    add_fields<2, 4>(block + 128 + part / 4 * 32, part % 4 * 2, words);
  }
  static int8_t scale(const uint8_t* block, int group) { return (int8_t)block[192 + group]; }
};
struct IQ4_XS : OfIntegers {
  static constexpr int BYTES = 136, BITS = 4;
  static void codes(const uint8_t* block, int part, uint64_t* words) { halves_of_16(block + 8 + 16 * part, words); }
  static int8_t scale(const uint8_t* block, int group) {
    const int low = block[4 + group / 2] >> group % 2 * 4 & 15, high = block[2 + group / 4] >> group % 4 * 2 & 3;
    return low + 16 * high - 32;
  }
};
struct MXFP4 : OfFloats {  // without its scales, which are bytes
  static constexpr int BYTES = 17, BITS = 4, SCALE = -1;
  static void codes(const uint8_t* block, int, uint64_t* words) { halves_of_16(block + 1, words); }
};

// Where the values of a block go: see aiakq_pack_blocks.
struct Packed {
  int64_t n, k;
  int adjacent;
  uint8_t* tiles;
  void *scales, *offsets;
};

// Writes the scales and offsets of row ``row`` in a block of ``Kind``, whose groups begin with ``first``.
template <class Kind> void put_scales(const Packed& to, const uint8_t* block, int64_t tile, int row, int64_t first) {
  const int64_t groups = to.k / Kind::GROUP;
  for (int group = 0; group < Kind::VALUES / Kind::GROUP; group++) {
    const int64_t at = (tile * groups + first + group) * TILE + row;
    if constexpr (!Kind::WIDE) {
      ((int8_t*)to.scales)[at] = Kind::scale(block, group);
      if (Kind::HAS_OFFSETS) ((int8_t*)to.offsets)[at] = Kind::offset(block, group);
    } else {
      if (Kind::SCALE >= 0) memcpy((uint16_t*)to.scales + at, block + Kind::SCALE, 2);
      if (Kind::HAS_OFFSETS) memcpy((uint16_t*)to.offsets + at, block + Kind::OFFSET, 2);
    }
  }
}

// Packs the rows of a tile, block after block, so that what is written stays in the cache.
template <class Kind> void pack_tile(const Packed& to, const uint8_t* rows, int64_t tile) {
  constexpr int PARTS = Kind::VALUES / BLOCK, BLOCK_BYTES = VECTOR_STRIDE * Kind::BITS;
  const int64_t blocks = to.k / Kind::VALUES, stride = blocks * Kind::BYTES;
  const int count = (int)min((int64_t)TILE, to.n - tile * TILE);
  uint8_t* out = to.tiles + tile * blocks * PARTS * BLOCK_BYTES;
  if (count < TILE || to.adjacent != 4) memset(out, 0, blocks * PARTS * BLOCK_BYTES);
  for (int64_t b = 0; b < blocks; b++)
    for (int row = 0; row < count; row++) {
      const uint8_t* block = rows + (tile * TILE + row) * stride + b * Kind::BYTES;
      put_scales<Kind>(to, block, tile, row, b * (Kind::VALUES / Kind::GROUP));
      for (int part = 0; part < PARTS; part++) {
        uint64_t words[4] = {};
        Kind::codes(block, part, words);
        uint8_t* half = out + (b * PARTS + part) * BLOCK_BYTES + row / 16 * 64;
        const uint8_t* codes = (const uint8_t*)words;
        if (to.adjacent == 4) put_block<Kind::BITS>(half + row % 16 * 4, codes);
        else
          for (int i = 0; i < BLOCK; i++)
            put(half + place_in_vector(to.adjacent, row % 16, i % 4), Kind::BITS, i / 4, codes[i]);
      }
    }
}

template <class Kind> void pack_tiles(const Packed& to, const uint8_t* rows, int32_t threads) {
  const int64_t count = ceil_div(to.n, TILE);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t tile = 0; tile < count; tile++) pack_tile<Kind>(to, rows, tile);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Rows of blocks of a GGUF file [N, bytes of K values] -> tiles as from aiakq_pack_codes, without padding of inputs.
// ``kind`` is ggml's number, ``math`` the LinearMath. Float16 scales and offsets or 8-bit integers go to ``scales`` and
// ``offsets`` [ceil(N / 32), groups, 32], except those of MXFP4; missing outputs are left as they are there. Returns
// whether the kind is known.
bool aiakq_pack_blocks(const uint8_t* rows, int64_t n, int64_t k, int32_t kind, int32_t math, uint8_t* tiles,
                       void* scales, void* offsets, int32_t threads) {
  const Packed to = {n, k, adjacent_inputs(math), tiles, scales, offsets};
  switch (kind) {
    case 2:
    case 20: pack_tiles<Q4_0>(to, rows, threads); return true;  // IQ4_NL is laid out like Q4_0
    case 3: pack_tiles<Q4_1>(to, rows, threads); return true;
    case 6: pack_tiles<Q5_0>(to, rows, threads); return true;
    case 7: pack_tiles<Q5_1>(to, rows, threads); return true;
    case 8: pack_tiles<Q8_0>(to, rows, threads); return true;
    case 10: pack_tiles<Q2_K>(to, rows, threads); return true;
    case 11: pack_tiles<Q3_K>(to, rows, threads); return true;
    case 12: pack_tiles<Q4_K>(to, rows, threads); return true;
    case 13: pack_tiles<Q5_K>(to, rows, threads); return true;
    case 14: pack_tiles<Q6_K>(to, rows, threads); return true;
    case 23: pack_tiles<IQ4_XS>(to, rows, threads); return true;
    case 39: pack_tiles<MXFP4>(to, rows, threads); return true;
    default: return false;
  }
}

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
