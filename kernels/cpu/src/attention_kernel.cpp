// Causal attention over the paged cache: decoding and prefill, chunked or not, in one way.
//
// The work is cut into items: a tile of a sequence's query tokens with all heads that share one key-value head. Their
// queries are the rows of a tile. Keys are walked in chunks of CHUNK positions, one position per lane: scored against
// all rows, weighted with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) whose maximum and sum are
// kept for a segment of SEGMENT positions. Segments are combined in their order. A tile of few rows reads the cache
// where it is; for more rows a chunk is brought into floats first. The borders of chunks and segments are multiples of
// their sizes, counted from the sequence's beginning, and a row's sums are made of exactly the positions it sees, in
// their order: its result is the same bit for bit in whatever tile, batch or chunk of the prompt it comes, and whether
// one thread goes through all segments or several share them.

#include "kernels.h"
#include "paged.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int SEGMENT = 1024;
constexpr int TILE_ROWS = 96;
// Up to so many rows a tile's chunks are read where they are: by every so many rows once.
constexpr int FEW_ROWS = 8;
// Below every score; multiplied by 0 it is 0, as infinity is not.
constexpr float NOTHING = -3.0e38f;

// What follows from the shapes alone.
struct Shape {
  int64_t group, tokens, rows, width;  // heads per key-value head; tokens and rows of a tile; D rounded up to 16
  int64_t part;                        // floats of a part
  explicit Shape(const Attention& a)
      : group(a.heads / a.kv_heads), tokens(most(1, TILE_ROWS / group)), rows(tokens * group),
        width(rounded(a.head_size, 16)), part(rounded(rows, 16) * 2 + rows * width) {}
};

// What is known of each row after some positions: highest score, sum of the weights, weighted sum of the values.
struct Part {
  float *highest, *total, *sums;
  Part(float* at, const Shape& shape)
      : highest(at), total(at + rounded(shape.rows, 16)), sums(at + 2 * rounded(shape.rows, 16)) {}
};

// A thread's own memory.
struct Room {
  float *queries, *weights;         // [rows, width], [rows, CHUNK]
  float *keys, *values;             // of a chunk, in the same place: values are read after the scores
  float *key_scales, *value_scales;  // [CHUNK]
  float *part, *whole;
  static int64_t floats(const Shape& s) {
    return s.rows * s.width + CHUNK * s.width + s.rows * CHUNK + 2 * CHUNK + 2 * rounded(s.part, 16);
  }
  Room(float* at, const Shape& s) {
    queries = at;
    keys = queries + s.rows * s.width;
    values = keys;
    weights = keys + CHUNK * s.width;
    key_scales = weights + s.rows * CHUNK;
    value_scales = key_scales + CHUNK;
    part = value_scales + CHUNK;
    whole = part + rounded(s.part, 16);
  }
};

// Goes through the tiles of a step in order.
struct Tiles {
  const Attention& a;
  const Shape& shape;
  int64_t sequence = 0, first = 0;

  // The next tile; false after the last one.
  bool next(Tile& tile) {
    const Step& step = *a.step;
    for (; sequence < step.sequences; sequence++, first = 0) {
      const int64_t start = step.query_start[sequence], count = step.query_start[sequence + 1] - start;
      if (first >= count) continue;
      const int64_t tokens = least(shape.tokens, count - first), length = step.kv_len[sequence];
      tile.sequence = sequence;
      tile.token = start + first;
      tile.rows = tokens * shape.group;
      tile.group = shape.group;
      tile.position = length - count + first;
      tile.window = a.window > 0 ? a.window : length + 1;
      tile.begin = most(0, tile.position - tile.window + 1);
      tile.end = most(tile.begin, tile.position + tokens);
      first += tokens;
      return true;
    }
    return false;
  }
};

INLINE int64_t segments(const Tile& tile) {
  return tile.end > tile.begin ? (tile.end - 1) / SEGMENT - tile.begin / SEGMENT + 1 : 1;
}

// --- products ----------------------------------------------------------------------------------------------------

template <int N> struct Count {
  static constexpr int value = N;
};

// work(Count of rows, first row) until all rows have had their turn.
template <class Work> INLINE void side_by_side(int64_t rows, Work work) {
  int64_t row = 0;
  if constexpr (MOST_ROWS >= 6)
    for (; row + 6 <= rows; row += 6) work(Count<6>{}, row);
  if constexpr (MOST_ROWS >= 4)
    for (; row + 4 <= rows; row += 4) work(Count<4>{}, row);
  if constexpr (MOST_ROWS >= 2)
    for (; row + 2 <= rows; row += 2) work(Count<2>{}, row);
  for (; row < rows; row++) work(Count<1>{}, row);
}

// work(Count of vectors, first element) from ``from`` to ``to``, multiples of 16, V vectors at a time and then fewer.
template <int V, class Work> INLINE void in_vectors(int64_t from, int64_t to, Work work) {
  for (; from + 16 * V <= to; from += 16 * V) work(Count<V>{}, from);
  if constexpr (V > 1) in_vectors<V / 2>(from, to, work);
}

// R rows against V vectors of keys from position ``at`` of the chunk on.
template <int TYPE, int R, int V>
INLINE void score(const float* queries, int64_t width, int64_t size, const Chunk& chunk, int64_t at, float* scores) {
  F sums[R][V];
  int64_t from[V];
  UNROLL for (int v = 0; v < V; v++) from[v] = chunk.key[at + 16 * v];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) sums[r][v] = splat(0);
  for (int64_t d = 0; d < size; d++) {
    F key[V];
    UNROLL for (int v = 0; v < V; v++) key[v] = load_as_float(chunk.keys, from[v] + d * chunk.stride, TYPE);
    UNROLL for (int r = 0; r < R; r++) {
      const F value = splat(queries[r * width + d]);
      UNROLL for (int v = 0; v < V; v++) sums[r][v] = fma(key[v], value, sums[r][v]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) store(scores + r * CHUNK + at + 16 * v, sums[r][v]);
}

// Adds positions ``from`` to ``to``, weighted, to V vectors of R rows' sums from element d on.
template <int TYPE, int R, int V>
INLINE void weigh(const float* weights, const Chunk& chunk, int64_t d, int64_t width, int from, int to, float* sums) {
  F held[R][V];
  sums += d;
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) held[r][v] = load(sums + r * width + 16 * v);
  for (int at = from; at < to; at++) {
    F value[V];
    UNROLL for (int v = 0; v < V; v++) value[v] = load_as_float(chunk.values, chunk.value[at] + d + 16 * v, TYPE);
    UNROLL for (int r = 0; r < R; r++) {
      const F weight = splat(weights[r * CHUNK + at]);
      UNROLL for (int v = 0; v < V; v++) held[r][v] = fma(value[v], weight, held[r][v]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) store(sums + r * width + 16 * v, held[r][v]);
}

template <int TYPE, int R>
INLINE void weigh_all(const float* weights, const Chunk& chunk, int64_t width, int from, int to, float* sums) {
  if (from >= to) return;
  in_vectors<wide(R)>(0, width, [&](auto count, int64_t d) {
    weigh<TYPE, R, decltype(count)::value>(weights, chunk, d, width, from, to, sums);
  });
}

// Scores of positions ``from`` to ``to`` become weights; ``highest`` and ``total`` are brought up to date. Returns the
// factor for what was summed up before. A score that is not finite makes the total not a number. Scales are those of
// codes of 8 bits, or null.
float soften(float* scores, const float* key_scales, const float* value_scales, int from, int to, float& highest,
             float& total) {
  const int start = from / 16 * 16, stop = (int)rounded(to, 16);
  if (key_scales)
    for (int i = start; i < stop; i += 16) store(scores + i, load(scores + i) * load(key_scales + i));
  for (int i = start; i < from; i++) scores[i] = NOTHING;
  for (int i = to; i < stop; i++) scores[i] = NOTHING;
  F best = splat(highest), broken = splat(0), added = splat(0);
  for (int i = start; i < stop; i += 16) {
    const F score = load(scores + i);
    best = larger(best, score);
    broken = fma(score, splat(0), broken);
  }
  const float now = largest(best);
  const F base = splat(now);
  for (int i = start; i < stop; i += 16) {
    const F weight = exponential(load(scores + i) - base);
    store(scores + i, value_scales ? weight * load(value_scales + i) : weight);
    added = added + weight;
  }
  float factor = 1;
  if (!(now == highest)) {
    alignas(64) float lanes[16];
    store(lanes, exponential(splat(highest - now)));
    factor = lanes[0];
  }
  highest = now;
  total = total * factor + sum(added + broken);
  return factor;
}

template <int TYPE, int R>
void score_rows(const Tile& tile, const Shape& s, int64_t size, const Room& room, const Chunk& chunk, int64_t row,
                int64_t start) {
  const int64_t from = tile.from(row, start) / 16 * 16, to = rounded(tile.to(row + R - 1, start), 16);
  in_vectors<wide(R)>(from, to, [&](auto count, int64_t at) {
    score<TYPE, R, decltype(count)::value>(room.queries + row * s.width, s.width, size, chunk, at,
                                           room.weights + row * CHUNK);
  });
}

template <int TYPE, int R>
void weigh_rows(const Tile& tile, const Shape& s, const Room& room, const Chunk& chunk, float* sums, int64_t row,
                int64_t start) {
  const float* weights = room.weights + row * CHUNK;
  sums += row * s.width;
  // What all rows see, side by side; before and after it each row by itself. A row's order stays that of positions.
  const int from = tile.from(row + R - 1, start), to = tile.to(row, start);
  const bool shared = R > 1 && from < to;
  const auto alone = [&](int r, int first, int last) {
    weigh_all<TYPE, 1>(weights + r * CHUNK, chunk, s.width, first, last, sums + r * s.width);
  };
  for (int r = 0; r < R; r++) alone(r, tile.from(row + r, start), shared ? from : tile.to(row + r, start));
  if (!shared) return;
  weigh_all<TYPE, R>(weights, chunk, s.width, from, to, sums);
  for (int r = 0; r < R; r++) alone(r, to, tile.to(row + r, start));
}

// --- tiles -------------------------------------------------------------------------------------------------------

void load_queries(const Attention& a, const Shape& s, const Tile& tile, int64_t head, float* queries) {
  for (int64_t row = 0; row < tile.rows; row++) {
    const int64_t from =
        (tile.token + row / s.group) * a.q_stride + (head * s.group + row % s.group) * a.head_size;
    for (int64_t d = 0; d < a.head_size; d += 16)
      store(queries + row * s.width + d, load_some(a.q, from + d, a.q_type, a.head_size - d) * splat(a.scale));
  }
}

void clear(const Part& part, const Shape& s, int64_t rows) {
  for (int64_t row = 0; row < rows; row++) {
    part.highest[row] = NOTHING;
    part.total[row] = 0;
  }
  memset(part.sums, 0, rows * s.width * sizeof(float));
}

// Scores, weights and weighted values of the chunk of positions from ``start`` on. ``load_values`` makes its values
// ready: they may lie where its keys were.
template <int TYPE, class Load>
INLINE void attend_chunk(const Attention& a, const Shape& s, const Tile& tile, const Room& room, const Chunk& chunk,
                         int64_t start, const Part& part, Load load_values) {
  side_by_side(tile.rows, [&](auto count, int64_t row) {
    score_rows<TYPE, decltype(count)::value>(tile, s, a.head_size, room, chunk, row, start);
  });
  const float* key_scales = a.k_scales ? room.key_scales : nullptr;
  const float* value_scales = a.v_scales ? room.value_scales : nullptr;
  for (int64_t row = 0; row < tile.rows; row++) {
    const int first = tile.from(row, start), last = tile.to(row, start);
    if (first >= last) continue;
    const float factor = soften(room.weights + row * CHUNK, key_scales, value_scales, first, last, part.highest[row],
                                part.total[row]);
    if (factor == 1) continue;
    float* sums = part.sums + row * s.width;
    for (int64_t d = 0; d < s.width; d += 16) store(sums + d, load(sums + d) * splat(factor));
  }
  load_values();
  side_by_side(tile.rows, [&](auto count, int64_t row) {
    weigh_rows<TYPE, decltype(count)::value>(tile, s, room, chunk, part.sums, row, start);
  });
}

// One segment of a tile, its queries loaded: what its rows see there becomes ``part``.
template <int TYPE>
void attend(const Attention& a, const Shape& s, const Tile& tile, int64_t head, int64_t segment, const Room& room,
            const Part& part) {
  clear(part, s, tile.rows);
  const bool direct = tile.rows <= FEW_ROWS && a.page_size % 16 == 0 && a.head_size % 16 == 0;
  int64_t key[CHUNK], value[CHUNK];
  for (int i = 0; i < CHUNK && !direct; i++) {
    key[i] = i * a.head_size;
    value[i] = i * s.width;
  }
  const int64_t begin = most(tile.begin, segment * SEGMENT) / CHUNK * CHUNK;
  const int64_t end = least(tile.end, (segment + 1) * SEGMENT);
  for (int64_t start = begin; start < end; start += CHUNK) {
    const Places here(a, tile, head, start);
    if (a.k_scales) {
      load_scales(a, a.k_scales, here, room.key_scales);
      load_scales(a, a.v_scales, here, room.value_scales);
    }
    if (direct) {
      const Chunk chunk{a.k_cache, a.v_cache, here.keys, here.values, a.page_size};
      attend_chunk<TYPE>(a, s, tile, room, chunk, start, part, [] {});
      continue;
    }
    load_keys<TYPE>(a, here, room.keys);
    const Chunk chunk{room.keys, room.values, key, value, 16};
    attend_chunk<FLOAT32>(a, s, tile, room, chunk, start, part, [&] { load_values<TYPE>(a, here, room.values); });
  }
}

decltype(&attend<FLOAT32>) attend_of(int32_t type) {
  switch (type) {
    case FLOAT32: return attend<FLOAT32>;
    case FLOAT16: return attend<FLOAT16>;
    case BFLOAT16: return attend<BFLOAT16>;
    default: return attend<INT8>;
  }
}

// Adds the part of a later segment to the whole. Rows that saw nothing there are left as they are.
void combine(const Shape& s, int64_t rows, const Part& whole, const Part& part) {
  for (int64_t row = 0; row < rows; row++) {
    if (part.total[row] == 0) continue;
    float* sums = whole.sums + row * s.width;
    const float* added = part.sums + row * s.width;
    if (whole.total[row] == 0) {
      whole.highest[row] = part.highest[row];
      whole.total[row] = part.total[row];
      memcpy(sums, added, s.width * sizeof(float));
      continue;
    }
    const float now = whole.highest[row] > part.highest[row] ? whole.highest[row] : part.highest[row];
    alignas(64) float lanes[16] = {whole.highest[row] - now, part.highest[row] - now};
    store(lanes, exponential(load(lanes)));
    const F before = splat(lanes[0]), fresh = splat(lanes[1]);
    whole.highest[row] = now;
    whole.total[row] = whole.total[row] * lanes[0] + part.total[row] * lanes[1];
    for (int64_t d = 0; d < s.width; d += 16) store(sums + d, fma(load(added + d), fresh, load(sums + d) * before));
  }
}

void write(const Attention& a, const Shape& s, const Tile& tile, int64_t head, const Part& whole) {
  for (int64_t row = 0; row < tile.rows; row++) {
    const int64_t at = (tile.token + row / s.group) * a.out_stride + (head * s.group + row % s.group) * a.head_size;
    const float total = whole.total[row];
    for (int64_t d = 0; d < a.head_size; d += 16) {
      const F value = total == 0 ? splat(0) : load(whole.sums + row * s.width + d) / splat(total);
      store_some(a.out, at + d, a.out_type, value, a.head_size - d);
    }
  }
}

// Tokens after the last sequence's, which nobody looks at, but which go on through the model.
void clear_padding(const Attention& a) {
  const int64_t bytes = bytes_of(a.out_type);
  for (int64_t token = a.step->query_start[a.step->sequences]; token < a.op.m; token++)
    memset((uint8_t*)a.out + token * a.out_stride * bytes, 0, (int64_t)a.heads * a.head_size * bytes);
}

}  // namespace

int64_t attention_scratch(const Attention& a) { return rounded(Room::floats(Shape(a)) * 4, 64); }

void attention(const void* op, Team& team) {
  const Attention& a = *(const Attention*)op;
  const Step& step = *a.step;
  const Shape s(a);
  const int64_t own = attention_scratch(a);
  const Room room((float*)((uint8_t*)a.scratch + team.rank * own), s);
  // Threads that there is memory for; with enough of it for parts, too.
  const int64_t workers = least(team.size, a.scratch_bytes / own);
  float* const parts = (float*)((uint8_t*)a.scratch + workers * own);
  int64_t items = 0, all_segments = 0;
  Tile tile;
  for (Tiles tiles{a, s}; tiles.next(tile);) {
    items += a.kv_heads;
    all_segments += segments(tile) * a.kv_heads;
  }
  // Few items and long ones: segments are shared out too, and their parts combined afterwards.
  const bool split = items < 4 * team.size && team.size > 1 && all_segments > items &&
                     workers * own + all_segments * s.part * 4 <= a.scratch_bytes;
  const Part part(room.part, s), whole(room.whole, s);
  const auto attend_segment = attend_of(a.cache_type);
  Tiles tiles{a, s};
  const int64_t all = split ? all_segments : items;
  int64_t before = 0, until = 0;
  const auto item = [&](int64_t index) {
    if (index == all) return clear_padding(a);
    while (index >= until) {
      tiles.next(tile);
      before = until;
      until += a.kv_heads * (split ? segments(tile) : 1);
    }
    const int64_t count = segments(tile), first = tile.begin / SEGMENT;
    const int64_t head = (index - before) / (split ? count : 1);
    load_queries(a, s, tile, head, room.queries);
    if (split)
      return attend_segment(a, s, tile, head, first + (index - before) % count, room, Part(parts + index * s.part, s));
    clear(whole, s, tile.rows);
    for (int64_t segment = first; segment < first + count; segment++) {
      attend_segment(a, s, tile, head, segment, room, part);
      combine(s, tile.rows, whole, part);
    }
    write(a, s, tile, head, whole);
  };
  const bool help = team.rank < workers;
  share(team, all + 1, 1, item, help);
  if (!split) return;
  Tiles again{a, s};
  int64_t passed = 0, from = 0, to = 0;
  const auto combined = [&](int64_t index) {
    for (; passed <= index; passed += a.kv_heads) {
      again.next(tile);
      from = to;
      to += a.kv_heads * segments(tile);
    }
    const int64_t head = index - (passed - a.kv_heads), count = segments(tile);
    clear(whole, s, tile.rows);
    for (int64_t i = 0; i < count; i++)
      combine(s, tile.rows, whole, Part(parts + (from + head * count + i) * s.part, s));
    write(a, s, tile, head, whole);
  };
  share(team, items, 1, combined, help);
}

}  // namespace ISA
}  // namespace aiakq
