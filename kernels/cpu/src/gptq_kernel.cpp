// Rounding with feedback: see Feedback in ops.h. Rows of the weight are independent, so a few of them (WIDTH) are taken
// through all columns of the block while these stay in the nearest cache.

#include "elements.h"
#include "kernels.h"
#include "team.h"

namespace aiakq {
namespace ISA {
namespace {

constexpr int64_t LANES = 16, PARTS = 2, WIDTH = LANES * PARTS;

// ``count`` (1 to WIDTH) weights side by side.
struct Wide {
  F part[PARTS];
};

INLINE Wide load_wide(const float* p, int64_t count) {
  Wide x;
  UNROLL for (int i = 0; i < PARTS; i++)
    x.part[i] = count > i * LANES ? load_some(p, i * LANES, FLOAT32, count - i * LANES) : splat(0);
  return x;
}

INLINE void store_wide(float* p, const Wide& x, int64_t count) {
  UNROLL for (int i = 0; i < PARTS; i++)
    if (count > i * LANES) store_some(p, i * LANES, FLOAT32, x.part[i], count - i * LANES);
}

INLINE void store_codes(uint8_t* p, const Wide& x, int64_t count) {
  UNROLL for (int i = 0; i < PARTS; i++) {
    int8_t bytes[LANES];
    if (count <= i * LANES) continue;
    store_low_bytes(bytes, to_int(x.part[i]));
    memcpy(p + i * LANES, bytes, least(LANES, count - i * LANES));
  }
}

// What an error adds to, or takes from, the columns behind column ``i``. Products are rounded before they are added:
// the same codes on every machine.
template <bool TAKE> INLINE void tell(Wide* held, int64_t i, int64_t length, const float* response, const Wide& error) {
  for (int64_t j = i + 1; j < length; j++) {
    const F share = splat(response[j]);
    UNROLL for (int at = 0; at < PARTS; at++) {
      const F part = share * error.part[at];
      held[j].part[at] = TAKE ? held[j].part[at] - part : held[j].part[at] + part;
    }
  }
}

template <bool SWEEP> void piece(const Feedback& a, int64_t from, int64_t count) {
  Wide held[FEEDBACK_LENGTH];
  const F top = splat((float)((1 << a.bits) - 1));
  for (int64_t j = 0; j < a.length; j++) held[j] = load_wide(a.block + j * a.stride + from, count);
  for (int64_t i = 0; i < a.op.m; i++) {
    const int64_t grid = a.groups[i] * a.grid_stride + from;
    const Wide scale = load_wide(a.scales + grid, count), zero = load_wide(a.zeros + grid, count);
    const float* response = a.response + i * a.response_stride;
    const F step = splat(SWEEP ? a.steps[i] : response[i]);
    Wide x = held[i], code, value, error;
    if constexpr (SWEEP) value = load_wide(a.values + i * a.stride + from, count);
    UNROLL for (int at = 0; at < PARTS; at++) {
      const F wish = SWEEP ? value.part[at] + step * x.part[at] : x.part[at];
      // In this order a lane without a scale becomes 0.
      code.part[at] = smaller(larger(nearest(wish / scale.part[at]) + zero.part[at], splat(0)), top);
      const F rounded = (code.part[at] - zero.part[at]) * scale.part[at];
      error.part[at] = SWEEP ? rounded - value.part[at] : (x.part[at] - rounded) / step;
      if constexpr (SWEEP) value.part[at] = rounded;
    }
    store_codes(a.codes + a.places[i] * a.grid_stride + from, code, count);
    if constexpr (SWEEP) store_wide(a.values + i * a.stride + from, value, count);
    if (a.drift) {
      store_wide(a.before + i * a.stride + from, x, count);
      tell<false>(held, i, a.length, a.drift + i * a.response_stride, x);
    }
    held[i] = error;
    tell<true>(held, i, a.length, response, error);
  }
  for (int64_t j = 0; j < a.length; j++) store_wide(a.block + j * a.stride + from, held[j], count);
}

}  // namespace

void feedback(const void* op, Team& team) {
  const Feedback& a = *(const Feedback*)op;
  share(team, pieces(a.n, WIDTH), 1, [&](int64_t at) {
    const int64_t from = at * WIDTH, count = least(WIDTH, a.n - from);
    a.values ? piece<true>(a, from, count) : piece<false>(a, from, count);
  });
}

}  // namespace ISA
}  // namespace aiakq
