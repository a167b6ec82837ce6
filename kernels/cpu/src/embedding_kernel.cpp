// Rows of a table of floats, which may lie in the tiles of a product that uses the same weights.

#include "elements.h"
#include "kernels.h"
#include "team.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int64_t TILE = 32;

// Sixteen values of a row of the tiles; see aiakq_pack_floats.
INLINE F from_tile(const Embedding& a, int64_t id, int64_t i, int64_t count) {
  const bool pairs = a.table_type == BFLOAT16;
  const int64_t bytes = bytes_of(a.table_type), lane = id % TILE;
  const uint8_t* tile = (const uint8_t*)a.table + id / TILE * TILE * (pairs ? a.d + a.d % 2 : a.d) * bytes;
  alignas(64) uint8_t held[64] = {};
  if (pairs) {
    for (int64_t at = 0; at < count; at += 2)
      memcpy(held + 2 * at, tile + ((i + at) / 2 * TILE + lane) * 4, 4);
  } else if (bytes == 4) {
    for (int64_t at = 0; at < count; at++) memcpy(held + 4 * at, tile + ((i + at) * TILE + lane) * 4, 4);
  } else {
    for (int64_t at = 0; at < count; at++) memcpy(held + 2 * at, tile + ((i + at) * TILE + lane) * 2, 2);
  }
  return load_as_float(held, 0, a.table_type);
}

}  // namespace

void embedding(const void* op, Team& team) {
  const Embedding& a = *(const Embedding*)op;
  const int64_t d = a.d;
  share(team, a.op.m, 1, [&](int64_t row) {
    const int64_t id = a.ids[row];
    const bool there = id >= 0 && id < a.vocabulary;
    for (int64_t i = 0; i < d; i += 16) {
      const int64_t count = least(16, d - i);
      F value = splat(__builtin_nanf(""));
      if (there)
        value = a.tiled ? from_tile(a, id, i, count) : load_some(a.table, id * d + i, a.table_type, count);
      store_some(a.y, row * a.y_stride + i, a.y_type, value, count);
    }
  });
}

}  // namespace ISA
}  // namespace aiakq
