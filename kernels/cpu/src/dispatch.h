// The kernels of one instruction set as a table, which the library chooses when it is loaded.

#pragma once

#include "ops.h"
#include "parallel.h"

namespace aiakq {

struct KernelTable {
  const char* isa;
  void (*run[KINDS])(const void* op, Worker& worker);
  int64_t (*scratch_bytes[KINDS])(const void* op);  // per row
};

}  // namespace aiakq
