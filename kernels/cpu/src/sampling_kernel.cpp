// Sampling from logits without sorting the vocabulary.
//
// Tokens are ordered by their scaled logits, descending, with ties broken by token id. Weights of the tokens that
// min-p, top-k and top-p keep are accumulated in float64, and the sampled token is the first whose cumulative weight
// exceeds the uniform number times the total. Only tokens that may be kept are collected and sorted: one pass collects
// those above a threshold, which rises whenever enough better tokens have been found. Penalties are applied to a copy of
// the row in scratch memory.

#include <math.h>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr float MIN_FLOAT = -3.402823466e38f;
constexpr float MINUS_INFINITY = -__builtin_inff();
// Number of tokens collected before the first sort.
constexpr int64_t FIRST_LIMIT = 2048;
// Number of chunks of a row without a cut.
constexpr int64_t CHUNKS = 256;

INLINE uint32_t lanes_left(int64_t left) { return left >= 16 ? 0xffff : (1u << left) - 1; }

// Logits and the mask of allowed tokens: bit t % 32 of word t / 32 is token t. Without a mask all tokens are allowed.
struct Logits {
  const float* x;
  const uint32_t* mask;
};

// Loads sixteen logits, starting at a multiple of 16; those past the end or of masked tokens are minus infinity.
INLINE F read(const Logits& logits, int64_t i, int64_t count) {
  const uint32_t allowed = logits.mask ? logits.mask[i / 32] >> (i & 16) & 0xffff : 0xffff;
  if (!allowed) return splat(MINUS_INFINITY);
  if (i + 16 <= count && allowed == 0xffff) return load(logits.x + i);
  if (i + 16 <= count) return select_bits(allowed, load(logits.x + i), splat(MINUS_INFINITY));
  alignas(64) float held[16];
  for (int lane = 0; lane < 16; lane++)
    held[lane] = i + lane < count && (allowed >> lane & 1) ? logits.x[i + lane] : MINUS_INFINITY;
  return load(held);
}

// e^x for x <= 0; exactly 0 below -87 and thus for masked tokens.
INLINE F weight_of(F x) { return select_ge(x, splat(-87.0f), exponential(x)); }

// Divides logits by the temperature; -0 becomes 0, so that equal values have equal keys.
INLINE F scaled(F x, F temperature) { return x / temperature + splat(0); }

// Maps floats to unsigned integers in descending order, and back.
INLINE uint32_t key_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}
INLINE float value_of(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key : ~key & 0x7fffffffu;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
INLINE float value_at(const uint64_t* keys, int64_t i) { return value_of((uint32_t)(keys[i] >> 32)); }

// The largest value, NaN if any is NaN.
float max_of(const Logits& x, int64_t count) {
  F best = splat(MINUS_INFINITY);
  uint32_t ordered = 0xffff;
  for (int64_t i = 0; i < count; i += 16) {
    const F value = read(x, i, count);
    ordered &= ge_mask(value, splat(MINUS_INFINITY));
    best = max(value, best);
  }
  return ordered == 0xffff ? reduce_max(best) : __builtin_nanf("");
}

int64_t first_at_least(const Logits& x, int64_t count, float value) {
  for (int64_t i = 0; i < count; i += 16) {
    const uint32_t found = ge_mask(read(x, i, count), splat(value)) & lanes_left(count - i);
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

int64_t count_above(const Logits& x, int64_t count, float value) {
  int64_t above = 0;
  for (int64_t i = 0; i < count; i += 16)
    above += __builtin_popcount(~ge_mask(splat(value), read(x, i, count)) & lanes_left(count - i));
  return above;
}

// The sum of e^(x / temperature - best) over x[from..to), in blocks of 128.
template <bool DIVIDED> double mass_of(const Logits& x, int64_t from, int64_t to, float temperature, float best) {
  const F t = splat(temperature), top = splat(best);
  double total = 0;
  for (int64_t i = from; i < to; i += 128) {
    F sums = splat(0);
    for (int64_t j = i; j < min(i + 128, to); j += 16) {
      const F value = read(x, j, to);
      sums = sums + weight_of((DIVIDED ? scaled(value, t) : value) - top);
    }
    total += reduce_add(sums);
  }
  return total;
}
double mass(const Logits& x, int64_t from, int64_t to, float temperature, float best) {
  return temperature == 1 ? mass_of<false>(x, from, to, 1, best) : mass_of<true>(x, from, to, temperature, best);
}

// Candidate tokens: the key of the scaled logit in the upper half, the token in the lower half.
struct Candidates {
  uint64_t* keys;
  uint64_t* scratch;  // memory for the same number of entries
  int64_t count;
};

// Stable sort by the upper half: equal values stay in token order, in which they were collected.
void sort(Candidates& c) {
  if (c.count <= 48) {
    for (int64_t i = 1; i < c.count; i++) {
      const uint64_t key = c.keys[i];
      int64_t at = i;
      for (; at > 0 && c.keys[at - 1] > key; at--) c.keys[at] = c.keys[at - 1];
      c.keys[at] = key;
    }
    return;
  }
  uint32_t starts[4][256] = {};
  for (int64_t i = 0; i < c.count; i++)
    for (int digit = 0; digit < 4; digit++) starts[digit][c.keys[i] >> (32 + 8 * digit) & 255]++;
  for (int digit = 0; digit < 4; digit++) {
    if (starts[digit][c.keys[0] >> (32 + 8 * digit) & 255] == c.count) continue;
    uint32_t before = 0;
    for (int value = 0; value < 256; value++) {
      const uint32_t here = starts[digit][value];
      starts[digit][value] = before;
      before += here;
    }
    for (int64_t i = 0; i < c.count; i++)
      c.scratch[starts[digit][c.keys[i] >> (32 + 8 * digit) & 255]++] = c.keys[i];
    uint64_t* sorted = c.scratch;
    c.scratch = c.keys;
    c.keys = sorted;
  }
}

// What to collect: the best ``max_tokens`` tokens or, if ``weight`` is not 0, the best tokens up to that total weight,
// where a token of value ``best`` has weight 1. Only values of at least ``threshold`` are collected.
struct Selection {
  float threshold;
  int64_t max_tokens;
  double weight;
  float best;
};

// Returns the number of sorted tokens that are selected.
int64_t selected(const Candidates& c, const Selection& selection) {
  if (selection.weight <= 0) return min(c.count, selection.max_tokens);
  double before = 0;
  for (int64_t i = 0; i < c.count; i++) {
    if (before >= selection.weight) return i;
    before += exp((double)(value_at(c.keys, i) - selection.best));
  }
  return c.count;
}

// Collects and sorts at least the selected tokens.
void collect(const Logits& x, int64_t count, float temperature, const Selection& selection, Candidates& c) {
  const F t = splat(temperature);
  F threshold = splat(selection.threshold);
  const int64_t max_tokens = selection.max_tokens;
  int64_t limit = max_tokens < count && max_tokens > FIRST_LIMIT / 2 ? 2 * max_tokens : FIRST_LIMIT;
  c.count = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const F values = scaled(read(x, i, count), t);
    uint32_t found = ge_mask(values, threshold) & lanes_left(count - i);
    if (!found) continue;
    alignas(64) float lanes[16];
    store(lanes, values);
    for (; found; found &= found - 1) {
      const int lane = __builtin_ctz(found);
      c.keys[c.count++] = (uint64_t)key_of(lanes[lane]) << 32 | (uint64_t)(i + lane);
    }
    if (c.count + 16 <= limit) continue;
    sort(c);
    const int64_t kept = selected(c, selection);
    if (kept < c.count || kept == max_tokens) {
      // There are enough tokens: any other must be better than the last of them.
      c.count = kept;
      threshold = splat(value_of((uint32_t)(c.keys[kept - 1] >> 32) - 1));
    }
    if (c.count > limit / 2) limit *= 4;
  }
  sort(c);
}

// Samples from all tokens, in vocabulary order.
int64_t sample_from_all(const SampleRow& row, const Logits& logits, int64_t count, float best) {
  const int64_t chunk = round_up(ceil_div(count, CHUNKS), 128);
  double sums[CHUNKS], total = 0;
  int64_t chunks = 0;
  for (int64_t from = 0; from < count; from += chunk, chunks++)
    total += sums[chunks] = mass(logits, from, min(from + chunk, count), row.temperature, best);
  const double target = row.uniform * total;
  double before = 0;
  int64_t at = 0;
  while (at + 1 < chunks && before + sums[at] <= target) before += sums[at++];
  // Due to rounding, the target may lie past the last chunk with nonzero weight.
  while (at > 0 && sums[at] == 0) before -= sums[--at];
  const F t = splat(row.temperature), top = splat(best);
  int64_t last = -1;
  for (int64_t i = at * chunk; i < min((at + 1) * chunk, count); i += 16) {
    alignas(64) float weights[16];
    store(weights, weight_of(scaled(read(logits, i, count), t) - top));
    for (int lane = 0; lane < 16; lane++) {
      if (weights[lane] <= 0) continue;
      last = i + lane;
      before += weights[lane];
      if (before > target) return last;
    }
  }
  return max(last, 0);
}

// Samples from the tokens that min-p, top-k and top-p keep, in descending order.
int64_t sample_from_best(const SampleRow& row, const Logits& logits, int64_t count, float best, Candidates& c) {
  const double total = mass(logits, 0, count, row.temperature, best);
  // Weights are relative to all tokens. The logarithm of their sum is rounded to float, as by torch.logsumexp.
  const float normalizer = (float)((double)best + log(total));
  const double whole = total * exp((double)(best - normalizer));
  const bool counted = row.top_k > 0 && row.top_k < count, ends = counted || row.min_p > 0;
  // The threshold may be too low but never too high.
  const float margin = 1e-3f + 1e-6f * fabsf(best);
  Selection selection = {MIN_FLOAT, counted ? row.top_k : count, 0, best};
  if (row.min_p > 0) selection.threshold = fmaxf(MIN_FLOAT, best + (float)log(row.min_p) - margin);
  if (!ends && row.top_p < 1) {
    selection.weight = row.top_p * total * (1 + 1e-5);
    // All tokens below it together weigh less than what top-p cuts off.
    selection.threshold = fmaxf(MIN_FLOAT, best + (float)log((1 - row.top_p) * total / (double)count) - margin);
  }
  collect(logits, count, row.temperature, selection, c);
  double* weights = (double*)c.scratch;
  const int64_t limit = min(c.count, selection.max_tokens);
  int64_t kept = 0;
  double all = 0;
  for (; kept < limit; kept++) {
    weights[kept] = exp((double)(value_at(c.keys, kept) - normalizer));
    if (weights[kept] < row.min_p * weights[0]) break;
    all += weights[kept];
    // Later tokens are not kept and do not count in the total.
    if (!ends && all - weights[kept] >= row.top_p * whole * (1 + 1e-5)) break;
  }
  if (!ends && kept < count) all = whole;
  double cumulative = 0;
  int64_t left = 0;
  for (; left < kept; left++) {
    const double next = cumulative + weights[left];
    if (next - weights[left] >= row.top_p * all) break;
    cumulative = next;
  }
  const double target = row.uniform * cumulative;
  double before = 0;
  int64_t at = 0;
  for (; at + 1 < left && weights[at + 1] > 0; at++) {
    before += weights[at];
    if (before > target) break;
  }
  return c.count ? (int64_t)(uint32_t)c.keys[at] : 0;
}

int64_t choose_token(const SampleRow& row, const Logits& logits, int64_t count, float best, Candidates& c) {
  if (!(row.temperature > 0)) return first_at_least(logits, count, best);
  const float top = best / row.temperature + 0.0f;
  if (!(fabsf(top) <= -MIN_FLOAT)) return first_at_least(logits, count, best);
  const bool cut = row.top_k > 0 || row.top_p < 1 || row.min_p > 0;
  return cut ? sample_from_best(row, logits, count, top, c) : sample_from_all(row, logits, count, top);
}

// Counts one more token of the sequence.
void count_token(TokenPenalties& p, int32_t token) {
  int32_t at = 0;
  while (at < p.size && p.tokens[at] != token) at++;
  if (at == p.size) {
    p.tokens[p.size++] = token;
    p.counts[at] = 0;
  }
  p.counts[at] += 1;
  p.length++;
}

// Writes the logits [count] with penalties to ``to``.
void penalize(const TokenPenalties& p, const float* logits, float* to, int64_t count) {
  memcpy(to, logits, count * sizeof(float));
  for (int32_t i = 0; i < p.size; i++) {
    if (p.tokens[i] >= count) continue;  // prompts may have tokens without logits
    float& value = to[p.tokens[i]];
    if (p.repetition != 1) value = value > 0 ? value / p.repetition : value * p.repetition;
    if (p.counts[i] > 0) value -= p.frequency * p.counts[i] + p.presence;
  }
}

void sample_row(SampleRow& row, int64_t count, Candidates& c, float* penalized) {
  const float* modified = row.logits;
  if (row.penalties) {
    if (row.length == row.penalties->length + 1) count_token(*row.penalties, row.last);
    penalize(*row.penalties, row.logits, penalized, count);
    modified = penalized;
  }
  const Logits raw = {row.raw, nullptr}, logits = {modified, row.mask};
  const float best = max_of(raw, count);
  const bool finite = fabsf(best) <= -MIN_FLOAT;
  row.normalizer = finite ? (float)((double)best + log(mass(raw, 0, count, 1, best))) : best;
  row.token = row.given >= 0 ? row.given : 0;
  row.rank = row.nothing_left = 0;
  row.log_probability = __builtin_nanf("");
  for (int64_t i = 0; i < row.count; i++) {
    row.top_ids[i] = (int32_t)i;
    row.top_values[i] = row.log_probability;
  }
  if (!finite) return;
  if (row.given < 0) {
    const float left = modified == row.raw && !row.mask ? best : max_of(logits, count);
    row.nothing_left = left == MINUS_INFINITY;
    if (!row.nothing_left) row.token = (int32_t)choose_token(row, logits, count, left, c);
  }
  row.log_probability = row.raw[row.token] - row.normalizer;
  if (row.ranked) row.rank = (int32_t)count_above(raw, count, row.raw[row.token]) + 1;
  if (!row.count) return;
  collect(raw, count, 1, {MINUS_INFINITY, row.count, 0, best}, c);
  for (int64_t i = 0; i < min(row.count, c.count); i++) {
    row.top_ids[i] = (int32_t)(uint32_t)c.keys[i];
    row.top_values[i] = value_at(c.keys, i) - row.normalizer;
  }
}

}  // namespace

void sample(const Sample& op, Worker& worker) {
  const int64_t count = op.vocabulary, half = round_up(count, 8) + 64;
  uint64_t* keys = (uint64_t*)op.scratch + worker.rank * (2 * half + round_up(count, 16) / 2);
  parallel_for(worker, op.m, 1, [&](int64_t row) {
    Candidates candidates = {keys, keys + half, 0};
    sample_row(op.rows[row], count, candidates, (float*)(keys + 2 * half));
  });
}

}  // namespace ISA
}  // namespace aiakq
