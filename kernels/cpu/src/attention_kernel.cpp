// Causal attention over the paged cache, for decoding and prefill alike, chunked or not.
//
// A work item is a tile of query tokens of one sequence and all query heads that share one key-value head; its rows are
// their queries. Keys are read in chunks of CHUNK positions, one position per lane, scored against
// all rows, and weighted with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), whose maximum and sum
// are kept per segment of SEGMENT positions. The results of the segments are combined in order. A tile with few rows
// reads the cache in place; with more rows each chunk is first converted to floats.
//
// Chunks and segments begin at multiples of their size, counted from the start of the sequence, and a row accumulates
// exactly the positions that it attends to, in order. Its result is therefore bit-identical in any tile, batch or
// prompt chunk, and for any distribution of segments over threads.

#include "kernels.h"
#include "paged.h"

namespace aiakq {
namespace ISA {
namespace {

// Tiles with at most this many rows read the cache in place, once per block of rows.
constexpr int MAX_DIRECT_ROWS = 8;
// Less than every score but finite, so that multiplying it by 0 gives 0.
constexpr float MIN_SCORE = -3.0e38f;

struct Shape {
  int64_t group;         // query heads per key-value head
  int64_t tokens, rows;  // maximum per tile
  int64_t width;         // D rounded up to 16
  int64_t value_width;   // value_size rounded up to 16
  int64_t partial;       // floats of a Partial
  explicit Shape(const Attention& op)
      : group(op.heads / op.kv_heads), tokens(max(1, TILE_ROWS / group)), rows(tokens * group),
        width(round_up(op.head_size, 16)), value_width(round_up(op.value_size, 16)),
        partial(round_up(rows, 16) * 2 + rows * value_width) {}
  int64_t chunk() const { return CHUNK * (width > value_width ? width : value_width); }
};

// The partial softmax of each row of a tile over some of its positions: the maximum score, the sum of the weights, and
// the weighted sum of the values.
struct Partial {
  float *highest, *total, *sums;
  Partial(float* at, const Shape& shape)
      : highest(at), total(at + round_up(shape.rows, 16)), sums(at + 2 * round_up(shape.rows, 16)) {}
};

// Scratch memory of one thread.
struct Workspace {
  float *queries, *weights;          // [rows, width], [rows, CHUNK]
  float *keys, *values;              // of a chunk, sharing memory: values are loaded after the scores are computed
  float *key_scales, *value_scales;  // [CHUNK]
  float *partial, *whole;            // of one segment, and of all segments
  static int64_t floats(const Shape& s) {
    return s.rows * s.width + s.chunk() + s.rows * CHUNK + 2 * CHUNK + 2 * round_up(s.partial, 16);
  }
  Workspace(float* at, const Shape& s) {
    queries = at;
    keys = queries + s.rows * s.width;
    values = keys;
    weights = keys + s.chunk();
    key_scales = weights + s.rows * CHUNK;
    value_scales = key_scales + CHUNK;
    partial = value_scales + CHUNK;
    whole = partial + round_up(s.partial, 16);
  }
};

// Enumerates the tiles of a step.
struct Tiles {
  const Attention& op;
  const Shape& shape;
  int64_t sequence = 0, first = 0;

  // Fills in the next tile; false after the last one.
  bool next(Tile& tile) {
    const Step& step = *op.step;
    for (; sequence < step.sequences; sequence++, first = 0) {
      const int64_t start = step.query_start[sequence], count = step.query_start[sequence + 1] - start;
      if (first >= count) continue;
      const int64_t tokens = min(shape.tokens, count - first), length = step.kv_len[sequence];
      tile.sequence = sequence;
      tile.token = start + first;
      tile.rows = tokens * shape.group, tile.group = shape.group;
      tile.position = length - count + first;
      tile.window = op.window > 0 ? op.window : length + 1;
      tile.chunk_size = op.chunk_size > 0 ? op.chunk_size : length + 1;
      tile.begin = tile.first(tile.position);
      tile.ends = step.row_ends;
      tile.end = max(tile.begin, tile.last(tokens - 1));
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

// work(Int<vectors>, first element) for the blocks of vectors from element ``from`` to ``to``, multiples of 16.
template <int MAX_VECTORS, class Work> INLINE void for_each_vector_block(int64_t from, int64_t to, Work work) {
  Blocks<8, 4, 2, 1>::for_each<MAX_VECTORS>(
      from / 16, to / 16, [&](auto count, int64_t vector) INLINE_LAMBDA { work(count, 16 * vector); });
}

// Scores of R rows for V vectors of positions from ``at`` of the chunk on.
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

// Adds the weighted values of positions ``from`` to ``to`` to the sums of R rows, V vectors from element d on.
template <int TYPE, int R, int V>
INLINE void accumulate(const float* weights, const Chunk& chunk, int64_t d, int64_t width, int from, int to,
                       float* sums) {
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

// Accumulates the weighted values of all elements.
template <int TYPE, int R>
INLINE void accumulate_vectors(const float* weights, const Chunk& chunk, int64_t width, int from, int to, float* sums) {
  if (from >= to) return;
  for_each_vector_block<max_vectors(R)>(0, width, [&](auto count, int64_t d) INLINE_LAMBDA {
    accumulate<TYPE, R, decltype(count)::value>(weights, chunk, d, width, from, to, sums);
  });
}

// Turns the scores of positions ``from`` to ``to`` into weights and updates ``highest`` and ``total``. Returns the
// factor by which earlier sums must be rescaled. A non-finite score makes the total NaN. The scales are those of an
// 8-bit cache, or null.
float online_softmax(float* scores, const float* key_scales, const float* value_scales, int from, int to,
                     float& highest, float& total) {
  const int start = from / 16 * 16, stop = (int)round_up(to, 16);
  if (key_scales)
    for (int i = start; i < stop; i += 16) store(scores + i, load(scores + i) * load(key_scales + i));
  for (int i = start; i < from; i++) scores[i] = MIN_SCORE;
  for (int i = to; i < stop; i++) scores[i] = MIN_SCORE;
  F best = splat(highest), not_finite = splat(0), added = splat(0);
  for (int i = start; i < stop; i += 16) {
    const F score = load(scores + i);
    best = max(best, score);
    not_finite = fma(score, splat(0), not_finite);
  }
  const float new_highest = reduce_max(best);
  const F base = splat(new_highest);
  for (int i = start; i < stop; i += 16) {
    const F weight = exponential(load(scores + i) - base);
    store(scores + i, value_scales ? weight * load(value_scales + i) : weight);
    added = added + weight;
  }
  float factor = 1;
  if (!(new_highest == highest)) {
    alignas(64) float lanes[16];
    store(lanes, exponential(splat(highest - new_highest)));
    factor = lanes[0];
  }
  highest = new_highest;
  total = total * factor + reduce_add(added + not_finite);
  return factor;
}

template <int TYPE, int R>
void score_rows(const Tile& tile, const Shape& s, int64_t size, const Workspace& ws, const Chunk& chunk, int64_t row,
                int64_t start) {
  const int64_t from = tile.from(row, start) / 16 * 16, to = round_up(tile.to(row + R - 1, start), 16);
  for_each_vector_block<max_vectors(R)>(from, to, [&](auto count, int64_t at) INLINE_LAMBDA {
    score<TYPE, R, decltype(count)::value>(ws.queries + row * s.width, s.width, size, chunk, at,
                                           ws.weights + row * CHUNK);
  });
}

template <int TYPE, int R>
void accumulate_rows(const Tile& tile, const Shape& s, const Workspace& ws, const Chunk& chunk, float* sums,
                     int64_t row, int64_t start) {
  const float* weights = ws.weights + row * CHUNK;
  sums += row * s.value_width;
  // Positions that all R rows attend to are processed together, those before and after row by row, so that every row
  // accumulates its positions in order.
  const int from = tile.from(row + R - 1, start), to = tile.to(row, start);
  const bool shared = R > 1 && from < to;
  const auto single_row = [&](int r, int first, int last) {
    accumulate_vectors<TYPE, 1>(weights + r * CHUNK, chunk, s.value_width, first, last, sums + r * s.value_width);
  };
  for (int r = 0; r < R; r++) single_row(r, tile.from(row + r, start), shared ? from : tile.to(row + r, start));
  if (!shared) return;
  accumulate_vectors<TYPE, R>(weights, chunk, s.value_width, from, to, sums);
  for (int r = 0; r < R; r++) single_row(r, to, tile.to(row + r, start));
}

// --- tiles -------------------------------------------------------------------------------------------------------

void load_queries(const Attention& op, const Shape& s, const Tile& tile, int64_t head, float* queries) {
  for (int64_t row = 0; row < tile.rows; row++) {
    const int64_t from =
        (tile.token + row / s.group) * op.q_stride + (head * s.group + row % s.group) * op.head_size;
    for (int64_t d = 0; d < op.head_size; d += 16)
      store(queries + row * s.width + d, load_partial(op.q, from + d, op.q_type, op.head_size - d) * splat(op.scale));
  }
}

void clear(const Partial& partial, const Shape& s, int64_t rows) {
  for (int64_t row = 0; row < rows; row++) {
    partial.highest[row] = MIN_SCORE;
    partial.total[row] = 0;
  }
  memset(partial.sums, 0, rows * s.value_width * sizeof(float));
}

// Initializes a partial result: no positions, or only the sinks of the heads.
void clear_whole(const Attention& op, const Shape& s, const Tile& tile, int64_t head, const Partial& whole) {
  clear(whole, s, tile.rows);
  for (int64_t row = 0; op.sinks && row < tile.rows; row++) {
    whole.highest[row] = op.sinks[head * s.group + row % s.group];
    whole.total[row] = 1;
  }
}

// Applies the scales of an 8-bit cache, the soft cap and ALiBi to the scores of positions ``from`` to ``to``. ``own``
// is the position of the row, relative to the start of the chunk like the others.
void modify_scores(const Attention& op, float* scores, const float* key_scales, int from, int to, int64_t query_head,
                   int64_t own) {
  alignas(64) static const float LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F slope = splat(op.alibi ? op.alibi[query_head] : 0);
  for (int i = from / 16 * 16; i < to; i += 16) {
    F score = load(scores + i);
    if (key_scales) score = score * load(key_scales + i);
    if (op.softcap > 0) {
      // tanh u = 1 - 2 / (1 + e^2u). Non-finite values become NaN.
      const F twice = score * splat(2 / op.softcap);
      const F power = exponential(max(min(twice, splat(40)), splat(-40)));
      score = fma(score, splat(0), splat(op.softcap) * (splat(1) - splat(2) / (splat(1) + power)));
    }
    if (op.alibi) score = fma(slope, load(LANES) + splat((float)(i - own)), score);
    store(scores + i, score);
  }
}

// Accumulates the chunk of positions starting at ``start`` into ``partial``. ``load_values`` is called when the keys
// are no longer needed, because values may share their memory.
template <int TYPE, class Load>
INLINE void attend_chunk(const Attention& op, const Shape& s, const Tile& tile, int64_t head, const Workspace& ws,
                         const Chunk& chunk, int64_t start, const Partial& partial, Load load_values) {
  RowBlocks::for_each(0, tile.rows, [&](auto count, int64_t row) {
    score_rows<TYPE, decltype(count)::value>(tile, s, op.head_size, ws, chunk, row, start);
  });
  const float* key_scales = op.k_scales ? ws.key_scales : nullptr;
  const float* value_scales = op.k_scales ? ws.value_scales : nullptr;
  for (int64_t row = 0; row < tile.rows; row++) {
    const int first = tile.from(row, start), last = tile.to(row, start);
    if (first >= last) continue;
    const bool modified = op.softcap > 0 || op.alibi;
    if (modified)
      modify_scores(op, ws.weights + row * CHUNK, key_scales, first, last, head * s.group + row % s.group,
                    tile.position + row / s.group - start);
    const float factor = online_softmax(ws.weights + row * CHUNK, modified ? nullptr : key_scales, value_scales, first,
                                        last, partial.highest[row], partial.total[row]);
    if (factor == 1) continue;
    float* sums = partial.sums + row * s.value_width;
    for (int64_t d = 0; d < s.value_width; d += 16) store(sums + d, load(sums + d) * splat(factor));
  }
  load_values();
  RowBlocks::for_each(0, tile.rows, [&](auto count, int64_t row) {
    accumulate_rows<TYPE, decltype(count)::value>(tile, s, ws, chunk, partial.sums, row, start);
  });
}

// Computes ``partial`` of one segment for a tile whose queries are loaded.
template <int TYPE>
void attend(const Attention& op, const Shape& s, const Tile& tile, int64_t head, int64_t segment,
            const Workspace& ws, const Partial& partial) {
  clear(partial, s, tile.rows);
  const bool direct = op.v_cache && tile.rows <= MAX_DIRECT_ROWS && op.page_size % 16 == 0 &&
                      op.head_size % 16 == 0 && op.value_size % 16 == 0;
  int64_t key[CHUNK], value[CHUNK];
  for (int i = 0; i < CHUNK && !direct; i++) {
    key[i] = i * op.head_size;
    value[i] = i * s.value_width;
  }
  const int64_t begin = max(tile.begin, segment * SEGMENT) / CHUNK * CHUNK;
  const int64_t end = min(tile.end, (segment + 1) * SEGMENT);
  for (int64_t start = begin; start < end; start += CHUNK) {
    const ChunkIndex index(op, tile, head, start);
    if (op.k_scales) {
      load_scales(op, op.k_scales, index, ws.key_scales);
      load_scales(op, op.v_cache ? op.v_scales : op.k_scales, index, ws.value_scales);
    }
    if (direct) {
      const Chunk chunk{op.k_cache, op.v_cache, index.keys, index.values, op.page_size};
      attend_chunk<TYPE>(op, s, tile, head, ws, chunk, start, partial, [] {});
      continue;
    }
    if (op.v_cache)
      load_keys<TYPE>(op, index, ws.keys);
    else
      load_latents<TYPE>(op, index, ws.keys);
    const Chunk chunk{ws.keys, ws.values, key, value, 16};
    attend_chunk<FLOAT32>(op, s, tile, head, ws, chunk, start, partial,
                          [&] { load_values<TYPE>(op, index, ws.values); });
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

// Combines the partial result of the next segment with the total. Rows that attend to none of its positions are
// unchanged.
void combine(const Shape& s, int64_t rows, const Partial& whole, const Partial& partial) {
  for (int64_t row = 0; row < rows; row++) {
    if (partial.total[row] == 0) continue;
    float* sums = whole.sums + row * s.value_width;
    const float* added = partial.sums + row * s.value_width;
    if (whole.total[row] == 0) {
      whole.highest[row] = partial.highest[row];
      whole.total[row] = partial.total[row];
      memcpy(sums, added, s.value_width * sizeof(float));
      continue;
    }
    const float now = whole.highest[row] > partial.highest[row] ? whole.highest[row] : partial.highest[row];
    alignas(64) float lanes[16] = {whole.highest[row] - now, partial.highest[row] - now};
    store(lanes, exponential(load(lanes)));
    const F before = splat(lanes[0]), fresh = splat(lanes[1]);
    whole.highest[row] = now;
    whole.total[row] = whole.total[row] * lanes[0] + partial.total[row] * lanes[1];
    for (int64_t d = 0; d < s.value_width; d += 16)
      store(sums + d, fma(load(added + d), fresh, load(sums + d) * before));
  }
}

void write(const Attention& op, const Shape& s, const Tile& tile, int64_t head, const Partial& whole) {
  for (int64_t row = 0; row < tile.rows; row++) {
    const int64_t at = (tile.token + row / s.group) * op.out_stride + (head * s.group + row % s.group) * op.value_size;
    const float total = whole.total[row];
    for (int64_t d = 0; d < op.value_size; d += 16) {
      const F value = total == 0 ? splat(0) : load(whole.sums + row * s.value_width + d) / splat(total);
      store_partial(op.out, at + d, op.out_type, value, op.value_size - d);
    }
  }
}

// Zeroes padding: tokens after the last sequence, whose unused results still pass through the rest of the model.
void clear_padding(const Attention& op) {
  const int64_t bytes = bytes_of(op.out_type);
  for (int64_t token = op.step->query_start[op.step->sequences]; token < op.m; token++)
    memset((uint8_t*)op.out + token * op.out_stride * bytes, 0, (int64_t)op.heads * op.value_size * bytes);
}

}  // namespace

int64_t scratch_bytes(const Attention& op) { return round_up(Workspace::floats(Shape(op)) * 4, 64); }

void attention(const Attention& op, Worker& worker) {
  const Shape s(op);
  const int64_t own = scratch_bytes(op);
  const Workspace ws((float*)((uint8_t*)op.scratch + worker.rank * own), s);
  const Partial partial(ws.partial, s), whole(ws.whole, s);
  // Use only as many threads as there is scratch memory for; the remainder holds partial results.
  const int64_t workers = min(worker.count, op.scratch_bytes / own);
  const bool help = worker.rank < workers;
  float* const partials = (float*)((uint8_t*)op.scratch + workers * own);
  int64_t items = 0, all_segments = 0;
  Tile tile;
  for (Tiles tiles{op, s}; tiles.next(tile);) {
    items += op.kv_heads;
    all_segments += segments(tile) * op.kv_heads;
  }
  // If items are few and long, also split their segments among threads and combine the results afterwards.
  const bool split = items < 4 * worker.count && worker.count > 1 && all_segments > items &&
                     workers * own + all_segments * s.partial * 4 <= op.scratch_bytes;
  const auto attend_segment = attend_of(op.cache_type);
  // The items of a thread ascend, so that it only moves forward through the tiles.
  Tiles tiles{op, s};
  const int64_t count = split ? all_segments : items;
  int64_t tile_begin = 0, tile_end = 0;
  const auto attend_item = [&](int64_t item) {
    if (item == count) return clear_padding(op);
    while (item >= tile_end) {
      tiles.next(tile);
      tile_begin = tile_end;
      tile_end += op.kv_heads * (split ? segments(tile) : 1);
    }
    const int64_t per_head = segments(tile), first = tile.begin / SEGMENT;
    const int64_t head = (item - tile_begin) / (split ? per_head : 1);
    load_queries(op, s, tile, head, ws.queries);
    if (split)
      return attend_segment(op, s, tile, head, first + (item - tile_begin) % per_head, ws,
                            Partial(partials + item * s.partial, s));
    clear_whole(op, s, tile, head, whole);
    for (int64_t segment = first; segment < first + per_head; segment++) {
      attend_segment(op, s, tile, head, segment, ws, partial);
      combine(s, tile.rows, whole, partial);
    }
    write(op, s, tile, head, whole);
  };
  parallel_for(worker, count + 1, 1, attend_item, help);
  if (!split) return;
  Tiles combined_tiles{op, s};
  int64_t item_end = 0, segment_begin = 0, segment_end = 0;
  const auto combine_item = [&](int64_t item) {
    for (; item_end <= item; item_end += op.kv_heads) {
      combined_tiles.next(tile);
      segment_begin = segment_end;
      segment_end += op.kv_heads * segments(tile);
    }
    const int64_t head = item - (item_end - op.kv_heads), per_head = segments(tile);
    clear_whole(op, s, tile, head, whole);
    for (int64_t i = 0; i < per_head; i++)
      combine(s, tile.rows, whole, Partial(partials + (segment_begin + head * per_head + i) * s.partial, s));
    write(op, s, tile, head, whole);
  };
  parallel_for(worker, items, 1, combine_item, help);
}

}  // namespace ISA
}  // namespace aiakq
