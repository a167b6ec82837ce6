// Lookup of rows of a float table, which may be stored as the tiles of a dense product with the same weights.

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

// Reads ``count`` values of row ``id``, starting at element i, from a table packed by aiakq_pack_floats.
INLINE F load_from_tile(const Embedding& op, int64_t id, int64_t i, int64_t count) {
  const bool pairs = op.table_type == BFLOAT16;
  const int64_t bytes = bytes_of(op.table_type), lane = id % TILE;
  const uint8_t* tile = (const uint8_t*)op.table + id / TILE * TILE * (pairs ? round_up(op.d, 2) : op.d) * bytes;
  alignas(64) uint8_t held[64] = {};
  if (pairs) {
    for (int64_t at = 0; at < count; at += 2)
      memcpy(held + 2 * at, tile + ((i + at) / 2 * TILE + lane) * 4, 4);
  } else if (bytes == 4) {
    for (int64_t at = 0; at < count; at++) memcpy(held + 4 * at, tile + ((i + at) * TILE + lane) * 4, 4);
  } else {
    for (int64_t at = 0; at < count; at++) memcpy(held + 2 * at, tile + ((i + at) * TILE + lane) * 2, 2);
  }
  return load_as_float(held, 0, op.table_type);
}

}  // namespace

void embedding(const Embedding& op, Worker& worker) {
  const int64_t d = op.d;
  parallel_for(worker, op.m, 1, [&](int64_t row) {
    const int64_t id = op.ids[row];
    const bool in_range = id >= 0 && id < op.vocabulary;
    for (int64_t i = 0; i < d; i += 16) {
      const int64_t count = min(16, d - i);
      F value = splat(__builtin_nanf(""));
      if (in_range)
        value = op.tiled ? load_from_tile(op, id, i, count) : load_partial(op.table, id * d + i, op.table_type, count);
      store_partial(op.y, row * op.y_stride + i, op.y_type, value, count);
    }
  });
}

}  // namespace ISA
}  // namespace aiakq
