// From logits to tokens without sorting the vocabulary.
//
// Which token a uniform number draws is defined over the tokens in order of their scaled logits, best first and the
// first of equal ones first: those that min-p, top-k and top-p leave share a cumulative distribution in float64, and
// the token is the first whose cumulative weight exceeds the number times the total. Only tokens that may be left are
// collected and sorted: one pass keeps those above a threshold, which rises whenever enough better ones were seen.

#include <math.h>

#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr float LOWEST = -3.402823466e38f;
constexpr float EVERYTHING = -__builtin_inff();
// Tokens collected before they are sorted for the first time.
constexpr int64_t FIRST_LIMIT = 2048;
// Chunks of a row that is drawn from whole.
constexpr int64_t CHUNKS = 256;

INLINE uint32_t lanes_left(int64_t left) { return left >= 16 ? 0xffff : (1u << left) - 1; }

// Sixteen logits; those past the end are minus infinity.
INLINE F read(const float* x, int64_t i, int64_t count) {
  if (i + 16 <= count) return load(x + i);
  alignas(64) float held[16];
  for (int lane = 0; lane < 16; lane++) held[lane] = i + lane < count ? x[i + lane] : EVERYTHING;
  return load(held);
}

// e^x of differences to the largest: what is not there, and what vanishes, weighs nothing.
INLINE F weight_of(F x) { return where_at_least(x, splat(-87.0f), exponential(x)); }

// Logits divided by the temperature; -0 becomes 0, so that equal values have equal keys.
INLINE F scaled(F x, F temperature) { return x / temperature + splat(0); }

// Unsigned integers in the order of floats from the largest down, and back.
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

// The largest of a row, NaN if one of it is.
float best_of(const float* x, int64_t count) {
  F best = splat(EVERYTHING);
  uint32_t ordered = 0xffff;
  for (int64_t i = 0; i < count; i += 16) {
    const F value = read(x, i, count);
    ordered &= at_least(value, splat(EVERYTHING));
    best = larger(value, best);
  }
  return ordered == 0xffff ? largest(best) : __builtin_nanf("");
}

int64_t first_at_least(const float* x, int64_t count, float value) {
  for (int64_t i = 0; i < count; i += 16) {
    const uint32_t found = at_least(read(x, i, count), splat(value)) & lanes_left(count - i);
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

int64_t count_above(const float* x, int64_t count, float value) {
  int64_t above = 0;
  for (int64_t i = 0; i < count; i += 16)
    above += __builtin_popcount(~at_least(splat(value), read(x, i, count)) & lanes_left(count - i));
  return above;
}

// The sum of e^(x / temperature - best) over x[from..to), in blocks of 128.
template <bool DIVIDED> double mass_of(const float* x, int64_t from, int64_t to, float temperature, float best) {
  const F t = splat(temperature), top = splat(best);
  double total = 0;
  for (int64_t i = from; i < to; i += 128) {
    F sums = splat(0);
    for (int64_t j = i; j < least(i + 128, to); j += 16) {
      const F value = read(x, j, to);
      sums = sums + weight_of((DIVIDED ? scaled(value, t) : value) - top);
    }
    total += sum(sums);
  }
  return total;
}
double mass(const float* x, int64_t from, int64_t to, float temperature, float best) {
  return temperature == 1 ? mass_of<false>(x, from, to, 1, best) : mass_of<true>(x, from, to, temperature, best);
}

// Tokens collected, and room for as many.
struct Collected {
  uint64_t* keys;
  uint64_t* room;
  int64_t count;
};

// Stable, by the upper half: equal values stay in the order in which they were collected, which is that of the tokens.
void sort(Collected& c) {
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
      c.room[starts[digit][c.keys[i] >> (32 + 8 * digit) & 255]++] = c.keys[i];
    uint64_t* sorted = c.room;
    c.room = c.keys;
    c.keys = sorted;
  }
}

// What has to be collected: the ``most`` best; or, with ``enough`` above 0, the best until those before weigh that
// much, a token of value ``best`` weighing 1.
struct Wanted {
  float threshold;
  int64_t most;
  double enough;
  float best;
};

// How many of the sorted tokens are wanted.
int64_t needed(const Collected& c, const Wanted& wanted) {
  if (wanted.enough <= 0) return least(c.count, wanted.most);
  double before = 0;
  for (int64_t i = 0; i < c.count; i++) {
    if (before >= wanted.enough) return i;
    before += exp((double)(value_at(c.keys, i) - wanted.best));
  }
  return c.count;
}

// Collects and sorts at least the tokens that are wanted.
void collect(const float* x, int64_t count, float temperature, const Wanted& wanted, Collected& c) {
  const F t = splat(temperature);
  F threshold = splat(wanted.threshold);
  int64_t limit = wanted.most < count && wanted.most > FIRST_LIMIT / 2 ? 2 * wanted.most : FIRST_LIMIT;
  c.count = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const F values = scaled(read(x, i, count), t);
    uint32_t found = at_least(values, threshold) & lanes_left(count - i);
    if (!found) continue;
    alignas(64) float lanes[16];
    store(lanes, values);
    for (; found; found &= found - 1) {
      const int lane = __builtin_ctz(found);
      c.keys[c.count++] = (uint64_t)key_of(lanes[lane]) << 32 | (uint64_t)(i + lane);
    }
    if (c.count + 16 <= limit) continue;
    sort(c);
    const int64_t kept = needed(c, wanted);
    if (kept < c.count || kept == wanted.most) {
      // Enough are there: another must be better than the last of them.
      c.count = kept;
      threshold = splat(value_of((uint32_t)(c.keys[kept - 1] >> 32) - 1));
    }
    if (c.count > limit / 2) limit *= 4;
  }
  sort(c);
}

// The first token whose cumulative weight exceeds ``uniform`` times the total, over all tokens as they come.
int64_t draw_from_all(const Choice& a, int64_t count, float best) {
  const int64_t chunk = pieces(pieces(count, CHUNKS), 128) * 128;
  double sums[CHUNKS], total = 0;
  int64_t chunks = 0;
  for (int64_t from = 0; from < count; from += chunk, chunks++)
    total += sums[chunks] = mass(a.logits, from, least(from + chunk, count), a.temperature, best);
  const double target = a.uniform * total;
  double before = 0;
  int64_t at = 0;
  while (at + 1 < chunks && before + sums[at] <= target) before += sums[at++];
  // Rounding may find the target past the last chunk that weighs anything.
  while (at > 0 && sums[at] == 0) before -= sums[--at];
  const F t = splat(a.temperature), top = splat(best);
  int64_t last = -1;
  for (int64_t i = at * chunk; i < least((at + 1) * chunk, count); i += 16) {
    alignas(64) float weights[16];
    store(weights, weight_of(scaled(read(a.logits, i, count), t) - top));
    for (int lane = 0; lane < 16; lane++) {
      if (weights[lane] <= 0) continue;
      last = i + lane;
      before += weights[lane];
      if (before > target) return last;
    }
  }
  return most(last, 0);
}

// The same over the tokens that min-p, top-k and top-p leave, best first.
int64_t draw_from_best(const Choice& a, int64_t count, float best, Collected& c) {
  const double total = mass(a.logits, 0, count, a.temperature, best);
  // Weights are relative to all tokens; the logarithm of their sum is rounded as torch.logsumexp does.
  const float normalizer = (float)((double)best + log(total));
  const double whole = total * exp((double)(best - normalizer));
  const bool counted = a.top_k > 0 && a.top_k < count, ends = counted || a.min_p > 0;
  // A threshold may be too low, never too high: some room for rounding.
  const float room = 1e-3f + 1e-6f * fabsf(best);
  Wanted wanted = {LOWEST, counted ? a.top_k : count, 0, best};
  if (a.min_p > 0) wanted.threshold = fmaxf(LOWEST, best + (float)log(a.min_p) - room);
  if (!ends && a.top_p < 1) {
    wanted.enough = a.top_p * total * (1 + 1e-5);
    // Were all tokens worth no more than this, together they would weigh less than what top-p leaves out.
    wanted.threshold = fmaxf(LOWEST, best + (float)log((1 - a.top_p) * total / (double)count) - room);
  }
  collect(a.logits, count, a.temperature, wanted, c);
  double* weights = (double*)c.room;
  const int64_t limit = least(c.count, wanted.most);
  int64_t kept = 0;
  double all = 0;
  for (; kept < limit; kept++) {
    weights[kept] = exp((double)(value_at(c.keys, kept) - normalizer));
    if (weights[kept] < a.min_p * weights[0]) break;
    all += weights[kept];
    // Beyond this nothing is kept, and nothing counts in the total.
    if (!ends && all - weights[kept] >= a.top_p * whole * (1 + 1e-5)) break;
  }
  if (!ends && kept < count) all = whole;
  double cumulative = 0;
  int64_t left = 0;
  for (; left < kept; left++) {
    const double next = cumulative + weights[left];
    if (next - weights[left] >= a.top_p * all) break;
    cumulative = next;
  }
  const double target = a.uniform * cumulative;
  double before = 0;
  int64_t at = 0;
  for (; at + 1 < left && weights[at + 1] > 0; at++) {
    before += weights[at];
    if (before > target) break;
  }
  return c.count ? (int64_t)(uint32_t)c.keys[at] : 0;
}

int64_t drawn(const Choice& a, int64_t count, float best, Collected& c) {
  if (a.given >= 0) return a.given;
  if (!(a.temperature > 0)) return first_at_least(a.logits, count, best);
  const float top = best / a.temperature + 0.0f;
  if (!(fabsf(top) <= -LOWEST)) return first_at_least(a.logits, count, best);
  const bool cut = a.top_k > 0 || a.top_p < 1 || a.min_p > 0;
  return cut ? draw_from_best(a, count, top, c) : draw_from_all(a, count, top);
}

void choose(Choice& a, int64_t count, Collected& c) {
  const float best = best_of(a.raw, count);
  const bool finite = fabsf(best) <= -LOWEST;
  a.normalizer = finite ? (float)((double)best + log(mass(a.raw, 0, count, 1, best))) : best;
  a.token = a.given >= 0 ? a.given : 0;
  a.rank = 0;
  a.log_probability = __builtin_nanf("");
  for (int64_t i = 0; i < a.count; i++) {
    a.top_ids[i] = (int32_t)i;
    a.top_values[i] = a.log_probability;
  }
  if (!finite) return;
  a.token = (int32_t)drawn(a, count, a.logits == a.raw ? best : best_of(a.logits, count), c);
  a.log_probability = a.raw[a.token] - a.normalizer;
  if (a.ranked) a.rank = (int32_t)count_above(a.raw, count, a.raw[a.token]) + 1;
  if (!a.count) return;
  collect(a.raw, count, 1, {EVERYTHING, a.count, 0, best}, c);
  for (int64_t i = 0; i < least(a.count, c.count); i++) {
    a.top_ids[i] = (int32_t)(uint32_t)c.keys[i];
    a.top_values[i] = value_at(c.keys, i) - a.normalizer;
  }
}

}  // namespace

void sample(const void* op, Team& team) {
  const Sample& a = *(const Sample*)op;
  const int64_t count = a.vocabulary, half = pieces(count, 8) * 8 + 64;
  uint64_t* keys = (uint64_t*)a.scratch + team.rank * 2 * half;
  share(team, a.op.m, 1, [&](int64_t row) {
    Collected collected = {keys, keys + half, 0};
    choose(a.choices[row], count, collected);
  });
}

}  // namespace ISA
}  // namespace aiakq
