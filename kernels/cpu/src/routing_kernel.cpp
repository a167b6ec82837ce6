// The router of a mixture: which experts a token is sent to, and with which weights.
//
// Largest elements are found by the algorithms of the standard library by which torch.topk finds them on a CPU, so that
// equal scores select the same experts. A softmax is computed in float64 and rounded once.

#include <math.h>

#include <algorithm>

#include "elements.h"
#include "kernels.h"

namespace aiakq {
namespace ISA {
namespace {

// In an unnamed namespace, so that what the standard library makes of it is not merged with the code for another
// instruction set.
struct Ranked {
  float value;
  int32_t index;
};

struct Larger {
  bool operator()(const Ranked& a, const Ranked& b) const {
    return (isnan(a.value) && !isnan(b.value)) || a.value > b.value;
  }
};

// Moves the ``k`` largest of ``count`` elements to the front, in descending order; NaN is larger than any number.
void select_largest(Ranked* all, int64_t count, int64_t k) {
  if (k * 64 <= count) return std::partial_sort(all, all + k, all + count, Larger{});
  std::nth_element(all, all + k - 1, all + count, Larger{});
  std::sort(all, all + k - 1, Larger{});
}

void rank(Ranked* all, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; i++) all[i] = {values[i], (int32_t)i};
}

// Scores of minus infinity get the weight 0; all weights are NaN if a score is, or the largest is not finite.
void softmax(const float* scores, int64_t count, float* weights) {
  float best = scores[0];
  bool ordered = true;
  for (int64_t i = 0; i < count; i++) {
    ordered &= !isnan(scores[i]);
    best = std::max(best, scores[i]);
  }
  if (!ordered || !isfinite(best)) {
    for (int64_t i = 0; i < count; i++) weights[i] = __builtin_nanf("");
    return;
  }
  double values[MAX_EXPERTS], total = 0;
  for (int64_t i = 0; i < count; i++) total += values[i] = exp((double)scores[i] - best);
  for (int64_t i = 0; i < count; i++) weights[i] = (float)(values[i] / total);
}

void apply_sigmoid(const float* scores, int64_t count, float* weights) {
  for (int64_t i = 0; i < count; i += 16)
    store_partial(weights, i, FLOAT32, sigmoid(load_partial(scores, i, FLOAT32, count - i)), count - i);
}

// Replaces values outside the best groups, those whose ``top`` largest values have the largest sums, by ``fill``.
void mask_groups(const Routing& op, float* values, int64_t top, float fill, Ranked* ranked) {
  if (op.kept_groups >= op.groups) return;
  const int64_t size = op.experts / op.groups;
  float sums[MAX_EXPERTS];
  for (int64_t group = 0; group < op.groups; group++) {
    rank(ranked, values + group * size, size);
    select_largest(ranked, size, top);
    sums[group] = ranked[0].value;
    for (int64_t i = 1; i < top; i++) sums[group] += ranked[i].value;
  }
  rank(ranked, sums, op.groups);
  select_largest(ranked, op.groups, op.kept_groups);
  bool kept[MAX_EXPERTS] = {};
  for (int64_t i = 0; i < op.kept_groups; i++) kept[ranked[i].index] = true;
  for (int64_t i = 0; i < op.experts; i++)
    if (!kept[i / size]) values[i] = fill;
}

// Selects the experts of one row by their softmax or sigmoid.
void select_best(const Routing& op, const float* scores, int64_t* selected, float* weights) {
  float all[MAX_EXPERTS], biased[MAX_EXPERTS];
  Ranked ranked[MAX_EXPERTS];
  const bool sigmoids = op.function == BY_SIGMOID;
  if (sigmoids) {
    apply_sigmoid(scores, op.experts, all);
  } else {
    softmax(scores, op.experts, all);
    mask_groups(op, all, 1, 0.0f, ranked);
  }
  for (int64_t i = 0; i < op.experts; i++) biased[i] = op.correction ? all[i] + op.correction[i] : all[i];
  if (sigmoids) mask_groups(op, biased, 2, -__builtin_inff(), ranked);
  rank(ranked, biased, op.experts);
  select_largest(ranked, op.experts, op.top_k);
  float total = 0;
  for (int64_t i = 0; i < op.top_k; i++) {
    selected[i] = ranked[i].index;
    total += weights[i] = all[selected[i]];
  }
  // This order of the operands propagates NaN.
  total = (total < op.smallest_sum ? op.smallest_sum : total) + op.epsilon;
  for (int64_t i = 0; i < op.top_k; i++) {
    if (op.normalize) weights[i] /= total;
    weights[i] *= op.scale;
  }
}

// Selects the experts of one row with the largest scores, weighted by their sigmoids.
void select_top(const Routing& op, const float* scores, int64_t* selected, float* weights) {
  Ranked ranked[MAX_EXPERTS];
  rank(ranked, scores, op.experts);
  select_largest(ranked, op.experts, op.top_k);
  for (int64_t i = 0; i < op.top_k; i++) {
    selected[i] = ranked[i].index;
    weights[i] = ranked[i].value;
  }
  apply_sigmoid(weights, op.top_k, weights);
}

// The first of the largest values; NaN is the largest.
int64_t index_of_largest(const float* values, int64_t count) {
  int64_t at = 0;
  for (int64_t i = 1; i < count; i++)
    if (Larger{}({values[i], 0}, {values[at], 0})) at = i;
  return at;
}

// Selects the best expert, then the best of the others, each weighted by a softmax over the scores close to its own.
void select_by_sparse_mixer(const Routing& op, const float* scores, int64_t* selected, float* weights) {
  float left[MAX_EXPERTS], near[MAX_EXPERTS];
  for (int64_t i = 0; i < op.experts; i++) left[i] = scores[i];
  for (int64_t a = 0; a < op.top_k; a++) {
    const int64_t at = index_of_largest(left, op.experts);
    const float best = left[at];
    for (int64_t i = 0; i < op.experts; i++) {
      const float magnitude = fabsf(scores[i]), bound = magnitude < best || isnan(best) ? best : magnitude;
      near[i] = (best - scores[i]) / bound > op.distance ? -__builtin_inff() : left[i];
    }
    softmax(near, op.experts, near);
    weights[a] = near[at];
    selected[a] = at;
    left[at] = -__builtin_inff();
  }
}

}  // namespace

void routing(const Routing& op, Worker& worker) {
  parallel_for(worker, op.m, chunk_size(worker, op.m, 8), [&](int64_t row) {
    float scores[MAX_EXPERTS];
    for (int64_t i = 0; i < op.experts; i += 16)
      store_partial(scores, i, FLOAT32, load_partial(op.scores, row * op.scores_stride + i, op.type, op.experts - i),
                    op.experts - i);
    int64_t* selected = op.selected + row * op.top_k;
    float* weights = op.weights + row * op.top_k;
    if (op.function == TOP_SIGMOID) return select_top(op, scores, selected, weights);
    if (op.function == SPARSE_MIXER) return select_by_sparse_mixer(op, scores, selected, weights);
    select_best(op, scores, selected, weights);
  });
}

}  // namespace ISA
}  // namespace aiakq
