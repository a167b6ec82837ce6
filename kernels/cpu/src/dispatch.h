// The kernel table of one instruction set; the library selects one when it is loaded.

#pragma once

#include "ops.h"
#include "parallel.h"

namespace aiakq {

// Whether the compiler supports bfloat16 dot products.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define BF16_PRODUCTS 1
#else
#define BF16_PRODUCTS 0
#endif

// Whether to use them: the instruction set vnni_bf16.
extern bool use_bf16_products;

struct KernelTable {
  void (*run[KINDS])(const void* op, Worker& worker);
  int64_t (*scratch_bytes[KINDS])(const void* op);  // per row
};

}  // namespace aiakq
