// The kernels of one instruction set as a table, which the library chooses when it is loaded.

#pragma once

#include "ops.h"
#include "parallel.h"

namespace aiakq {

// Whether the compiler knows the instruction that multiplies pairs of bfloat16.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define BF16_PRODUCTS 1
#else
#define BF16_PRODUCTS 0
#endif

// Whether to use it: the instruction set vnni_bf16.
extern bool use_bf16_products;

struct KernelTable {
  void (*run[KINDS])(const void* op, Worker& worker);
  int64_t (*scratch_bytes[KINDS])(const void* op);  // per row
};

}  // namespace aiakq
