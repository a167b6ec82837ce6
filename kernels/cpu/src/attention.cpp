// Causal attention over the paged cache: decoding and prefill, chunked or not, in one way.
//
// The work is cut into items: a tile of a sequence's query tokens with all heads that share one key-value head. Their
// queries are the rows of a tile. Keys are walked in chunks of CHUNK positions: brought into floats, keys with one
// position per lane, scored against all rows, weighted with an online softmax (Milakov and Gimelshein 2018,
// arXiv:1805.02867) whose maximum and sum are kept for a segment of SEGMENT positions. Segments are combined in their
// order. The borders of chunks and segments are multiples of their sizes, counted from the sequence's beginning, and a
// row touches exactly the positions it sees: its result is the same bit for bit in whatever tile, batch or chunk of the
// prompt it comes, and whether one thread goes through all segments or several share them.

#include "kernels.h"
#include "paged.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int SEGMENT = 1024;
constexpr int TILE_ROWS = 96;
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
  float *queries, *weights;  // [rows, width], [rows, CHUNK]
  float *keys, *values;      // [width, CHUNK], [CHUNK, width]; in the same place: values are read after the scores
  float *part, *whole;
  static int64_t floats(const Shape& s) {
    return s.rows * s.width + CHUNK * s.width + s.rows * CHUNK + 2 * rounded(s.part, 16);
  }
  Room(float* at, const Shape& s) {
    queries = at;
    keys = queries + s.rows * s.width;
    values = keys;
    weights = keys + CHUNK * s.width;
    part = weights + s.rows * CHUNK;
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

// R rows against 16 * WIDE keys.
template <int R>
INLINE void score(const float* queries, int64_t width, int64_t size, const float* keys, float* scores) {
  F sums[R][WIDE];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < WIDE; v++) sums[r][v] = splat(0);
  for (int64_t d = 0; d < size; d++) {
    F key[WIDE];
    UNROLL for (int v = 0; v < WIDE; v++) key[v] = load(keys + d * CHUNK + 16 * v);
    UNROLL for (int r = 0; r < R; r++) {
      const F value = splat(queries[r * width + d]);
      UNROLL for (int v = 0; v < WIDE; v++) sums[r][v] = fma(key[v], value, sums[r][v]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < WIDE; v++) store(scores + r * CHUNK + 16 * v, sums[r][v]);
}

// Adds positions ``from`` to ``to``, weighted, to V vectors of R rows' sums.
template <int R, int V>
INLINE void weigh(const float* weights, const float* values, int64_t width, int from, int to, float* sums) {
  F held[R][V];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) held[r][v] = load(sums + r * width + 16 * v);
  for (int at = from; at < to; at++) {
    F value[V];
    UNROLL for (int v = 0; v < V; v++) value[v] = load(values + at * width + 16 * v);
    UNROLL for (int r = 0; r < R; r++) {
      const F weight = splat(weights[r * CHUNK + at]);
      UNROLL for (int v = 0; v < V; v++) held[r][v] = fma(value[v], weight, held[r][v]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) store(sums + r * width + 16 * v, held[r][v]);
}

template <int R>
void weigh_all(const float* weights, const float* values, int64_t width, int from, int to, float* sums) {
  if (from >= to) return;
  int64_t d = 0;
  for (; d + 16 * WIDE <= width; d += 16 * WIDE) weigh<R, WIDE>(weights, values + d, width, from, to, sums + d);
  for (; d < width; d += 16) weigh<R, 1>(weights, values + d, width, from, to, sums + d);
}

// Scores of positions ``from`` to ``to`` become weights; ``highest`` and ``total`` are brought up to date. Returns the
// factor for what was summed up before. A score that is not finite makes the total not a number.
float soften(float* scores, int from, int to, float& highest, float& total) {
  const int start = from / 16 * 16, stop = (int)rounded(to, 16);
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
    store(scores + i, weight);
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

template <int R>
void score_rows(const Tile& tile, const Shape& s, int64_t size, const Room& room, int64_t row, int64_t chunk) {
  const int from = tile.from(row, chunk), to = tile.to(row + R - 1, chunk);
  for (int at = from / (16 * WIDE) * (16 * WIDE); at < to; at += 16 * WIDE)
    score<R>(room.queries + row * s.width, s.width, size, room.keys + at, room.weights + row * CHUNK + at);
}

template <int R>
void weigh_rows(const Tile& tile, const Shape& s, const Room& room, float* sums, int64_t row, int64_t chunk) {
  const float* weights = room.weights + row * CHUNK;
  sums += row * s.width;
  // What all rows see, side by side; before and after it each row by itself. A row's order stays that of positions.
  const int from = tile.from(row + R - 1, chunk), to = tile.to(row, chunk);
  const bool shared = R > 1 && from < to;
  for (int r = 0; r < R; r++)
    weigh_all<1>(weights + r * CHUNK, room.values, s.width, tile.from(row + r, chunk),
                 shared ? from : tile.to(row + r, chunk), sums + r * s.width);
  if (!shared) return;
  weigh_all<R>(weights, room.values, s.width, from, to, sums);
  for (int r = 0; r < R; r++)
    weigh_all<1>(weights + r * CHUNK, room.values, s.width, to, tile.to(row + r, chunk), sums + r * s.width);
}

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

// One segment of a tile, its queries loaded: what its rows see there becomes ``part``.
void attend(const Attention& a, const Shape& s, const Tile& tile, int64_t head, int64_t segment, const Room& room,
            const Part& part) {
  clear(part, s, tile.rows);
  const Loading cached = loading_of(a.cache_type);
  const int64_t start = most(tile.begin, segment * SEGMENT) / CHUNK * CHUNK;
  const int64_t stop = least(tile.end, (segment + 1) * SEGMENT);
  Places after(a, tile, head, start);
  for (int i = after.from; i < after.to; i++)
    expect(a.k_cache, a.k_scales, after.rows[i], a.head_size * bytes_of(a.cache_type));
  for (int64_t chunk = start; chunk < stop; chunk += CHUNK) {
    const Places here = after;
    after = Places(a, tile, head, chunk + CHUNK);
    cached.keys(a, here, room.keys);
    side_by_side(tile.rows, [&](auto count, int64_t row) {
      score_rows<decltype(count)::value>(tile, s, a.head_size, room, row, chunk);
    });
    for (int64_t row = 0; row < tile.rows; row++) {
      const int first = tile.from(row, chunk), last = tile.to(row, chunk);
      if (first >= last) continue;
      const float factor = soften(room.weights + row * CHUNK, first, last, part.highest[row], part.total[row]);
      if (factor == 1) continue;
      float* sums = part.sums + row * s.width;
      for (int64_t d = 0; d < s.width; d += 16) store(sums + d, load(sums + d) * splat(factor));
    }
    cached.values(a, here, after, room.values);
    side_by_side(tile.rows, [&](auto count, int64_t row) {
      weigh_rows<decltype(count)::value>(tile, s, room, part.sums, row, chunk);
    });
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
    if (split) return attend(a, s, tile, head, first + (index - before) % count, room, Part(parts + index * s.part, s));
    clear(whole, s, tile.rows);
    for (int64_t segment = first; segment < first + count; segment++) {
      attend(a, s, tile, head, segment, room, part);
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
