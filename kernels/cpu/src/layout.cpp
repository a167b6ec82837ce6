// Packs weights, once at load time, into the layouts that linear_kernel.cpp and dense_kernel.cpp read.

#include "layout.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

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

// The word of a lane of a vector that holds the codes of ``word``: those of the operands of a vector are next to each
// other in the bits of a byte, those of an operand in its bytes.
template <int BITS> inline uint32_t lane_of(uint32_t word) {
  if (BITS == 8) return word;
  uint32_t lane = 0;
  UNROLL for (int operand = 0; operand < 8 / BITS; operand++)
    UNROLL for (int i = 0; i < 4; i++) {
      const uint32_t code = word >> (4 * operand + i) * BITS & ((1u << BITS) - 1);
      lane |= code << (8 * i + operand * BITS);
    }
  return lane;
}

template <int BITS>
void pack_words(const uint32_t* words, int64_t stride_n, int64_t stride_w, int64_t n, int64_t k, uint8_t* tiles,
                int32_t threads) {
  const int64_t count = ceil_div(n, TILE), width = k * BITS / 32;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t tile = 0; tile < count; tile++) {
    uint32_t* out = (uint32_t*)(tiles + tile * width * VECTOR_STRIDE);
    const uint32_t* first = words + tile * TILE * stride_n;
    const int64_t rows = min(TILE, n - tile * TILE);
    for (int64_t w = 0; w < width; w++) {
      uint32_t lanes[TILE] = {};
      if (rows == TILE && stride_n == 1)
        for (int row = 0; row < TILE; row++) lanes[row] = lane_of<BITS>(first[row + w * stride_w]);
      else
        for (int64_t row = 0; row < rows; row++) lanes[row] = lane_of<BITS>(first[row * stride_n + w * stride_w]);
      memcpy(out + w * TILE, lanes, sizeof(lanes));
    }
  }
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
// 32 codes of a part, eight in each word. D and M are the bytes at which a block has float16 numbers, -1 for none: its
// scale and offset or, if it has several groups, the steps of theirs, which ``scale`` and ``offset`` return as integers.

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

struct OneGroup {
  static constexpr int VALUES = 32, GROUP = 32, D = 0, M = -1;
};
struct ManyGroups {
  static constexpr int VALUES = 256, GROUP = 32, D = 0, M = -1;
};

struct Q4_0 : OneGroup {
  static constexpr int BYTES = 18, BITS = 4;
  static void codes(const uint8_t* block, int, uint64_t* words) { halves_of_16(block + 2, words); }
};
struct Q4_1 : OneGroup {
  static constexpr int BYTES = 20, BITS = 4, M = 2;
  static void codes(const uint8_t* block, int, uint64_t* words) { halves_of_16(block + 4, words); }
};
struct Q5_0 : OneGroup {
  static constexpr int BYTES = 22, BITS = 5;
  static void codes(const uint8_t* block, int, uint64_t* words) {
    halves_of_16(block + 6, words);
    add_fifth_bits(block + 2, words);
  }
};
struct Q5_1 : OneGroup {
  static constexpr int BYTES = 24, BITS = 5, M = 2;
  static void codes(const uint8_t* block, int, uint64_t* words) {
    halves_of_16(block + 8, words);
    add_fifth_bits(block + 4, words);
  }
};
struct Q8_0 : OneGroup {
  static constexpr int BYTES = 34, BITS = 8;
  static void codes(const uint8_t* block, int, uint64_t* words) {
    UNROLL for (int i = 0; i < 4; i++) words[i] = load_eight(block + 2 + 8 * i) ^ EVERY_BYTE * 0x80;
  }
};
struct Q2_K : ManyGroups {
  static constexpr int BYTES = 84, BITS = 2, GROUP = 16, D = 80, M = 82;
  static void codes(const uint8_t* block, int part, uint64_t* words) {
    add_fields<2>(block + 16 + part / 4 * 32, part % 4 * 2, words);
  }
  static int8_t scale(const uint8_t* block, int group) { return block[group] & 15; }
  static int8_t offset(const uint8_t* block, int group) { return block[group] >> 4; }
};
struct Q3_K : ManyGroups {
  static constexpr int BYTES = 110, BITS = 3, GROUP = 16, D = 108;
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
struct OfSixBits : ManyGroups {
  static constexpr int M = 2;
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
struct Q6_K : ManyGroups {
  static constexpr int BYTES = 210, BITS = 6, GROUP = 16, D = 208;
  static void codes(const uint8_t* block, int part, uint64_t* words) {
    add_fields<4>(block + part / 4 * 64 + part % 2 * 32, part % 4 / 2 * 4, words);
    add_fields<2, 4>(block + 128 + part / 4 * 32, part % 4 * 2, words);
  }
  static int8_t scale(const uint8_t* block, int group) { return (int8_t)block[192 + group]; }
};
struct IQ4_XS : ManyGroups {
  static constexpr int BYTES = 136, BITS = 4;
  static void codes(const uint8_t* block, int part, uint64_t* words) { halves_of_16(block + 8 + 16 * part, words); }
  static int8_t scale(const uint8_t* block, int group) {
    const int low = block[4 + group / 2] >> group % 2 * 4 & 15, high = block[2 + group / 4] >> group % 4 * 2 & 3;
    return low + 16 * high - 32;
  }
};
struct MXFP4 : OneGroup {  // its scale is an exponent of 8 bits, the first byte
  static constexpr int BYTES = 17, BITS = 4, D = -1;
  static void codes(const uint8_t* block, int, uint64_t* words) { halves_of_16(block + 1, words); }
};

// Where rows of blocks are: one after the other in memory, or in files: row r in file starts[r] >> 48, from the byte on
// that the lower bits say. ``width`` is the bytes of a row.
struct Rows {
  const uint8_t* memory;
  const int64_t* starts;
  const int32_t* files;
  int64_t width;

  // Returns ``count`` rows, which are read to ``buffer`` if they are in files; null if that fails.
  const uint8_t* fetch(int64_t first, int64_t count, uint8_t* buffer) const {
    if (memory) return memory + first * width;
    for (int64_t row = 0, end; row < count; row = end) {
      const int64_t start = starts[first + row];
      for (end = row + 1; end < count && starts[first + end] == start + (end - row) * width;) end++;
      const int64_t position = start & (((int64_t)1 << 48) - 1), bytes = (end - row) * width;
      for (int64_t done = 0; done < bytes;) {
        const auto got = pread(files[start >> 48], buffer + row * width + done, bytes - done, position + done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return nullptr;
        done += got;
      }
    }
    return buffer;
  }
};

// Where their values go: see aiakq_pack_blocks.
struct Packed {
  int64_t n, k;
  int adjacent;
  uint8_t* tiles;
  uint8_t *scales, *offsets;
  uint16_t *scale_steps, *offset_steps;
};

// Copies the float16 number at ``from``; returns whether it is finite.
inline bool put_half(uint16_t* to, const uint8_t* from) {
  memcpy(to, from, 2);
  return (*to & 0x7c00) != 0x7c00;
}

// Writes the scales and offsets of row ``row`` in block ``number`` of a row; returns whether they are finite.
template <class Kind>
bool put_scales(const Packed& to, const uint8_t* block, int64_t tile, int row, int64_t number) {
  constexpr int COUNT = Kind::VALUES / Kind::GROUP;
  const int64_t at = (tile * (to.k / Kind::VALUES) + number) * TILE + row;
  if constexpr (Kind::D < 0) {
    to.scales[at] = block[0];
    return block[0] != 255;
  } else if constexpr (COUNT == 1) {
    return put_half((uint16_t*)to.scales + at, block + Kind::D) &
           (Kind::M < 0 || put_half((uint16_t*)to.offsets + at, block + Kind::M));
  } else {
    for (int group = 0; group < COUNT; group++) {
      const int64_t place = ((tile * (to.k / Kind::VALUES) + number) * COUNT + group) * TILE + row;
      to.scales[place] = (uint8_t)Kind::scale(block, group);
      if constexpr (Kind::M >= 0) to.offsets[place] = (uint8_t)Kind::offset(block, group);
    }
    return put_half(to.scale_steps + at, block + Kind::D) &
           (Kind::M < 0 || put_half(to.offset_steps + at, block + Kind::M));
  }
}

// Packs the rows of a tile, block after block, so that what is written stays in the cache. Returns whether all numbers
// are finite.
template <class Kind> bool pack_tile(const Packed& to, const uint8_t* rows, int64_t tile, int64_t width) {
  constexpr int PARTS = Kind::VALUES / BLOCK, BLOCK_BYTES = VECTOR_STRIDE * Kind::BITS;
  const int64_t blocks = to.k / Kind::VALUES;
  const int count = (int)min((int64_t)TILE, to.n - tile * TILE);
  uint8_t* out = to.tiles + tile * blocks * PARTS * BLOCK_BYTES;
  if (count < TILE || to.adjacent != 4) memset(out, 0, blocks * PARTS * BLOCK_BYTES);
  bool finite = true;
  for (int64_t number = 0; number < blocks; number++)
    for (int row = 0; row < count; row++) {
      const uint8_t* block = rows + row * width + number * Kind::BYTES;
      finite &= put_scales<Kind>(to, block, tile, row, number);
      for (int part = 0; part < PARTS; part++) {
        uint64_t words[4] = {};
        Kind::codes(block, part, words);
        uint8_t* half = out + (number * PARTS + part) * BLOCK_BYTES + row / 16 * 64;
        const uint8_t* codes = (const uint8_t*)words;
        if (to.adjacent == 4) put_block<Kind::BITS>(half + row % 16 * 4, codes);
        else
          for (int i = 0; i < BLOCK; i++)
            put(half + place_in_vector(to.adjacent, row % 16, i % 4), Kind::BITS, i / 4, codes[i]);
      }
    }
  return finite;
}

enum PackStatus { PACKED, UNKNOWN_KIND, NOT_READ, NOT_FINITE };

template <class Kind> int32_t pack_tiles(const Packed& to, Rows rows, int32_t threads) {
  const int64_t count = ceil_div(to.n, TILE);
  rows.width = to.k / Kind::VALUES * Kind::BYTES;
  std::atomic<int32_t> status{PACKED};
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint8_t> buffer(rows.memory ? 0 : TILE * rows.width);
#pragma omp for schedule(dynamic, 8)
    for (int64_t tile = 0; tile < count; tile++) {
      const uint8_t* found = rows.fetch(tile * TILE, min((int64_t)TILE, to.n - tile * TILE), buffer.data());
      if (!found) status = NOT_READ;
      else if (!pack_tile<Kind>(to, found, tile, rows.width)) status = NOT_FINITE;
    }
  }
  return status;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Rows of blocks of a GGUF file [N, bytes of K values], at ``rows`` or, if that is null, in ``files`` (Rows), -> tiles as
// from aiakq_pack_codes, without padding of inputs. ``kind`` is ggml's number, ``math`` the LinearMath. Scales and
// offsets go to [ceil(N / 32), groups, 32]: float16 numbers, the exponents of MXFP4, or integers of 8 bits with steps
// [ceil(N / 32), steps, 32] float16. What belongs to missing outputs is not written. Returns a PackStatus.
int32_t aiakq_pack_blocks(const uint8_t* rows, const int64_t* starts, const int32_t* files, int64_t n, int64_t k,
                          int32_t kind, int32_t math, uint8_t* tiles, uint8_t* scales, uint8_t* offsets,
                          uint16_t* scale_steps, uint16_t* offset_steps, int32_t threads) {
  const Packed to = {n, k, adjacent_inputs(math), tiles, scales, offsets, scale_steps, offset_steps};
  const Rows from = {rows, starts, files, 0};
  switch (kind) {
    case 2:
    case 20: return pack_tiles<Q4_0>(to, from, threads);  // IQ4_NL is laid out like Q4_0
    case 3: return pack_tiles<Q4_1>(to, from, threads);
    case 6: return pack_tiles<Q5_0>(to, from, threads);
    case 7: return pack_tiles<Q5_1>(to, from, threads);
    case 8: return pack_tiles<Q8_0>(to, from, threads);
    case 10: return pack_tiles<Q2_K>(to, from, threads);
    case 11: return pack_tiles<Q3_K>(to, from, threads);
    case 12: return pack_tiles<Q4_K>(to, from, threads);
    case 13: return pack_tiles<Q5_K>(to, from, threads);
    case 14: return pack_tiles<Q6_K>(to, from, threads);
    case 23: return pack_tiles<IQ4_XS>(to, from, threads);
    case 39: return pack_tiles<MXFP4>(to, from, threads);
    default: return UNKNOWN_KIND;
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

// words [N, W] int32, W = K * bits / 32, which hold the codes of an output, packed along the inputs -> the tiles of
// aiakq_pack_codes, K being a multiple of 32 and ``bits`` 2, 4 or 8. ``stride_n`` and ``stride_w`` are strides of words.
void aiakq_pack_words(const uint32_t* words, int64_t stride_n, int64_t stride_w, int64_t n, int64_t k, int32_t bits,
                      uint8_t* tiles, int32_t threads) {
  switch (bits) {
    case 2: return pack_words<2>(words, stride_n, stride_w, n, k, tiles, threads);
    case 4: return pack_words<4>(words, stride_n, stride_w, n, k, tiles, threads);
    default: return pack_words<8>(words, stride_n, stride_w, n, k, tiles, threads);
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
