// What the library is asked to do: a list of operations, each a plain struct that begins with an Op.
//
// kernels/cpu/library.py has the same structs; it compares their sizes with aiakq_size when it loads the library.
// Shapes: M rows, N outputs, K inputs, G inputs per group; H heads, D head size, P page size, T tokens, S sequences.

#pragma once

#include <cstdint>

namespace aiakq {

enum Kind : int32_t { LINEAR, DENSE, EMBEDDING, NORM, ROTARY, ATTENTION, GATE, SAMPLE, FEEDBACK, KINDS };

// Types of elements.
enum Type : int32_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, UINT8 = 3, INT8 = 4 };

// How a quantized product is computed: with the activations as they are, or rounded to 8 bits, per 32 inputs or per row.
enum Math : int32_t { EXACT = 0, BLOCKS = 1, ROWS = 2 };

struct Op {
  int32_t kind;
  int32_t m;  // rows, the same place in every struct
};

// y [M, N] = x [M, K] W^T (+ bias) (+ residual), with W = (codes - zero) * scale per group of G inputs; see layout.cpp.
struct Linear {
  Op op;
  int32_t n, k, bits, math;
  int32_t group;         // inputs per group as they are in the tiles: 8, 16 or a multiple of 32
  int32_t groups;        // per row of W
  int32_t scale_type;    // FLOAT32, FLOAT16 or BFLOAT16
  int32_t zero_type;     // UINT8 or FLOAT32
  int32_t x_type, y_type;
  const void* x;
  void* y;
  const void* residual;  // [M, N] of y's type, or null; may be y itself
  int64_t x_stride, y_stride, residual_stride;  // elements from row to row
  const uint8_t* tiles;  // codes
  const void* scales;    // [N / 32, groups, 32]
  const void* zeros;     // the same, or null: 2^(bits - 1)
  const int32_t* source; // [blocks * 32] the input at each place in the tiles, -1 for padding; null: as they are
  const float* bias;     // [N rounded up to 32] or null
  const float* input_scale;  // one number for all rows (ROWS only), or null: one per row
  void* scratch;         // M * aiakq_linear_scratch() bytes, 64-byte aligned
};

// y [M, N] = x [M, K] W^T (+ bias) (+ residual), W in floats.
struct Dense {
  Op op;
  int32_t n, k, weight_type, x_type, y_type, reserved;
  const void* x;
  void* y;
  const void* residual;
  int64_t x_stride, y_stride, residual_stride;
  const void* tiles;
  const float* bias;
  void* scratch;  // M * aiakq_dense_scratch() bytes
};

// y [M, D] = rows ``ids`` of a table [V, D]; a row that is not there is NaN.
struct Embedding {
  Op op;
  int32_t d, table_type, y_type;
  int32_t tiled;  // the table is as aiakq_pack_floats leaves it, bfloat16 in pairs; else row by row
  int64_t vocabulary, y_stride;
  const void* table;
  const int64_t* ids;
  void* y;
};

// y [M, D] = x / rms(x) * weight, or centered: (x - mean) / deviation * weight + bias.
struct Norm {
  Op op;
  int32_t d, x_type;     // y has x's type
  int32_t centered;
  float epsilon;
  void* x;
  void* y;
  const void* residual;  // [M, D] of x's type, or null; added to x, which is written
  int64_t x_stride, y_stride, residual_stride;
  const float* weight;
  const float* bias;     // centered only, or null
};

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };

// y [M, I] = act(gate) * up, or act(gate) alone; y may be gate.
struct Gate {
  Op op;
  int32_t columns, type, activation, reserved;
  const void* gate;
  const void* up;  // or null
  void* y;
  int64_t gate_stride, up_stride, y_stride;
};

// What is asked of one row of logits, and the answer.
struct Choice {
  const float* logits;  // [V] what the token is drawn from
  const float* raw;     // [V] what the log-probabilities are of; may be the same
  double uniform, top_p, min_p;
  float temperature;    // 0: the largest, the first of equal ones
  int32_t top_k;        // 0: no limit
  int32_t given;        // a token, whose log-probability is wanted; -1: draw one
  int32_t count;        // most likely tokens wanted
  int32_t ranked;       // whether the token's rank is wanted
  int32_t token;        // --- the answer
  int32_t rank;         // 1 for the most likely
  float normalizer;     // log of the sum of e^raw; not finite if the row is not
  float log_probability;
  int32_t reserved;
  int32_t* top_ids;     // [count] best first, the first of equal ones first
  float* top_values;    // [count] their log-probabilities
};

// One token per row.
struct Sample {
  Op op;
  int32_t vocabulary, reserved;
  Choice* choices;  // [M]
  void* scratch;    // per thread: 16 bytes for each token of the vocabulary, and 1024
};

// Columns of a weight, rounded one after the other while the columns behind each make up for its error: the inside of a
// lazy block of GPTQ, and of the sweeps after it (aiakq/quantizers/numerics/gptq_block.py). A column of the weight is a row
// here, so that N weights lie side by side.
struct Feedback {
  Op op;                 // M: columns to round
  int32_t n, length;     // of the block: M columns and those that hear of them, FEEDBACK_LENGTH at most
  int32_t bits, reserved;
  int64_t stride;        // elements from row to row of block, before and values
  int64_t grid_stride;   // of scales, zeros and codes
  int64_t response_stride;  // of response and drift
  float* block;          // [length, N] weights, or where values would like to move; the first M become errors, or moves
  const float* response; // [length, length] what an error in column i takes from column j > i
  const float* drift;    // the same for what column i was before it was rounded, which is added; or null
  float* before;         // [M, N] what that was, if there is a drift
  float* values;         // [M, N] what the codes stand for, changed to what the new ones do; null: an error is what is
                         // left of a weight over response[i, i]
  const float* steps;    // [M] with values: how far they move
  const float* scales;   // [groups, N]
  const float* zeros;
  uint8_t* codes;        // [K, N]
  const int32_t* groups; // [M] rows of scales and zeros
  const int32_t* places; // [M] rows of codes
};
constexpr int64_t FEEDBACK_LENGTH = 128;

// Where the tokens of one step are in the paged cache; AttentionContext in kernels/types.py. The same for all layers.
struct Step {
  int32_t sequences, max_pages;
  const int32_t* query_start;  // [S + 1]
  const int32_t* kv_len;       // [S]
  const int32_t* page_table;   // [S, max_pages]
  const int64_t* slots;        // [T], 0 for padding
  const int64_t* positions;    // [T], or null where nothing is rotated
};

// In place: q = rotate(norm(q)). Into the cache at the tokens' slots: rotate(norm(k)) and v.
struct Rotary {
  Op op;
  int32_t heads, kv_heads, head_size, rotated;  // the first ``rotated`` elements of a head are turned
  int32_t x_type, cache_type;                   // of q, k and v; of the cache: INT8 has a scale per token and head
  float eps;
  int32_t page_size;
  const Step* step;
  void* q;  // [T, H * D], or null: only keys and values are written
  const void* k;
  const void* v;  // [T, Hkv * D]
  int64_t q_stride, k_stride, v_stride;
  const float* q_norm;  // [D] or null
  const float* k_norm;
  const float* cosines;  // [positions, rotated / 2] or null
  const float* sines;
  void* k_cache;    // [pages, Hkv, D, P]
  void* v_cache;    // [pages, Hkv, P, D]
  float* k_scales;  // [pages, Hkv, P]
  float* v_scales;
};

// out [T, H * D] = softmax(scale q k^T) v: every token over the positions up to its own, or the last ``window`` of them.
struct Attention {
  Op op;
  int32_t heads, kv_heads, head_size, page_size;
  int32_t window;  // 0: no limit
  int32_t q_type, out_type, cache_type;
  float scale;
  int32_t reserved;
  const Step* step;
  const void* q;
  void* out;
  int64_t q_stride, out_stride;
  const void* k_cache;
  const void* v_cache;
  const float* k_scales;
  const float* v_scales;
  void* scratch;  // aiakq_scratch() bytes per thread, and room for parts (kernels/cpu/attention.py)
  int64_t scratch_bytes;
};

}  // namespace aiakq
