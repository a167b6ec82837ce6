// The experts of a mixture: pairs of a token and an expert are sorted by expert, all products of the first layers are one
// loop, those of the second layers another, and every token's outputs are summed.
//
// The number of loops must not depend on where tokens are routed: a thread that comes late finds the loop of an earlier
// layer over, whatever it then reads of it. Results are those of one expert after the other.

#include <string.h>

#include "elements.h"
#include "kernels.h"
#include "product_items.h"

namespace aiakq {
namespace ISA {
namespace {

// Columns of an item of the sum.
constexpr int64_t COLUMNS = 512;

// Sorts the pairs, those of an expert in the order of tokens.
void sort_pairs(const Experts& op) {
  const int64_t count = (int64_t)op.m * op.top_k;
  int32_t* starts = op.starts;
  memset(starts, 0, sizeof(int32_t) * (op.experts + 1));
  for (int64_t pair = 0; pair < count; pair++) starts[op.selected[pair] + 1]++;
  for (int64_t e = 0; e < op.experts; e++) starts[e + 1] += starts[e];
  for (int64_t pair = 0; pair < count; pair++) {
    const int32_t row = starts[op.selected[pair]]++;
    op.pairs[row] = (int32_t)pair;
    // Keep the token's rows ascending.
    int32_t* places = op.places + pair / op.top_k * op.top_k;
    int64_t at = pair % op.top_k;
    for (; at > 0 && places[at - 1] > row; at--) places[at] = places[at - 1];
    places[at] = row;
  }
  // Every start has moved to that of the next expert.
  for (int64_t e = op.experts; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
}

INLINE void gather_row(const Experts& op, int64_t row) {
  const int32_t pair = op.pairs[row];
  const int64_t bytes = bytes_of(op.type), from = pair / op.top_k * op.x_stride;
  if (!op.weigh_inputs) {
    memcpy((uint8_t*)op.rows + row * op.k * bytes, (const uint8_t*)op.x + from * bytes, op.k * bytes);
    return;
  }
  const F weight = splat(op.weights[pair]);
  for (int64_t i = 0; i < op.k; i += 16)
    store_partial(op.rows, row * op.k + i, op.type, load_partial(op.x, from + i, op.type, op.k - i) * weight, op.k - i);
}

// One layer of each expert, applied to the expert's own rows of x, which are contiguous as those of y.
struct Products {
  const Experts& op;
  const void* const* layers;
  const void* x;
  void* y;

  template <class Layer> Layer placed(int64_t e) const {
    Layer layer = *(const Layer*)layers[e];
    const int64_t start = op.starts[e], bytes = bytes_of(op.type);
    layer.m = op.starts[e + 1] - op.starts[e];
    layer.x = (const uint8_t*)x + start * layer.k * bytes;
    layer.y = (uint8_t*)y + start * layer.n * bytes;
    layer.scratch = op.scratch + start * op.scratch_per_row;
    return layer;
  }

  template <class Work> auto with_layer(int64_t e, Work work) const {
    return *(const int32_t*)layers[e] == KIND_dense ? work(placed<Dense>(e)) : work(placed<Linear>(e));
  }
};

// work(layer, number of its item) for all items of all experts with rows, of which items(layer) says how many there are.
template <class Items, class Work>
INLINE void parallel_for_experts(Worker& worker, const Products& products, int64_t max_chunk, Items items, Work work) {
  const Experts& op = products.op;
  const auto items_of = [&](int64_t e) -> int64_t {
    return op.starts[e] == op.starts[e + 1] ? 0 : products.with_layer(e, items);
  };
  int64_t total = 0;
  for (int64_t e = 0; e < op.experts; e++) total += items_of(e);
  // The items that a thread takes ascend.
  int64_t e = -1, first = 0, stop = 0;
  parallel_for(worker, total, chunk_size(worker, total, max_chunk), [&](int64_t item) {
    while (item >= stop) {
      e++;
      first = stop;
      stop += items_of(e);
    }
    products.with_layer(e, [&](const auto& layer) { work(layer, item - first); });
  });
}

void multiply(Worker& worker, const Products& products) {
  parallel_for_experts(
      worker, products, 1, [](const auto& layer) { return packing_items(layer); },
      [](const auto& layer, int64_t item) { pack_item(layer, item); });
  parallel_for_experts(
      worker, products, 8, [](const auto& layer) { return product_items(layer); },
      [](const auto& layer, int64_t item) { product_item(layer, item); });
}

// Columns ``from`` to ``to`` of y for one token.
INLINE void sum_columns(const Experts& op, int64_t token, int64_t from, int64_t to) {
  const int32_t* places = op.places + token * op.top_k;
  F factor = splat(1);
  if (op.gate) factor = sigmoid(splat(load_element(op.gate, token * op.gate_stride, op.type)));
  for (int64_t i = from; i < to; i += 16) {
    F sum = splat(0);
    for (int64_t a = 0; a < op.top_k; a++) {
      const int64_t row = places[a];
      F value = load_partial(op.outputs, row * op.n + i, op.type, to - i);
      if (!op.weigh_inputs) value = value * splat(op.weights[op.pairs[row]]);
      sum = sum + value;
    }
    if (op.shared) {
      F value = load_partial(op.shared, token * op.shared_stride + i, op.type, to - i);
      if (op.gate) value = factor * value;
      sum = sum + value;
    }
    store_partial(op.y, token * op.y_stride + i, op.type, sum, to - i);
  }
}

}  // namespace

void experts(const Experts& op, Worker& worker) {
  const int64_t count = (int64_t)op.m * op.top_k;
  parallel_for(worker, 1, 1, [&](int64_t) { sort_pairs(op); });
  parallel_for(worker, count, chunk_size(worker, count, 8), [&](int64_t row) { gather_row(op, row); });
  multiply(worker, {op, op.first, op.rows, op.both});
  Activation act = *op.act;
  act.m = (int32_t)count;
  act.gate = op.both;
  act.up = op.width == act.columns ? nullptr : (const uint8_t*)op.both + act.columns * bytes_of(op.type);
  act.y = op.mid;
  activation(act, worker);
  multiply(worker, {op, op.second, op.mid, op.outputs});
  const int64_t across = ceil_div(op.n, COLUMNS), items = op.m * across;
  parallel_for(worker, items, chunk_size(worker, items, 8), [&](int64_t item) {
    const int64_t from = item % across * COLUMNS;
    sum_columns(op, item / across, from, min(from + COLUMNS, op.n));
  });
}

}  // namespace ISA
}  // namespace aiakq
