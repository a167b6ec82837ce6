// The library's C interface: which instruction set is used, and running lists of operations.

#include <omp.h>
#include <sched.h>

#include <cstring>

#include "ops.h"
#define ISA portable
#include "kernels.h"
#undef ISA

namespace aiakq {

#define DECLARE(isa)          \
  namespace isa {             \
  extern const Table table;   \
  }
DECLARE(portable)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(vnni)
#endif

void let_others_run() { sched_yield(); }

namespace {

// Best first.
const Table* const TABLES[] = {
#if defined(__x86_64__)
    &vnni::table, &avx512::table, &avx2::table,
#endif
    &portable::table,
};

bool runs_here(const Table* table) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (table == &avx2::table) return avx2;
  if (table == &avx512::table) return avx512;
  if (table == &vnni::table) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
  return true;
}

const Table* used = nullptr;

const Table* best() {
  for (const Table* table : TABLES)
    if (runs_here(table)) return table;
  return nullptr;
}

}  // namespace
}  // namespace aiakq

using namespace aiakq;

extern "C" {

// The instruction set in use.
const char* aiakq_isa() { return (used ? used : used = best())->name; }

// Use the instruction set ``name``; false if this machine does not have it.
bool aiakq_use_isa(const char* name) {
  for (const Table* table : TABLES)
    if (!strcmp(table->name, name) && runs_here(table)) {
      used = table;
      return true;
    }
  return false;
}

int64_t aiakq_size(int32_t kind) {
  switch (kind) {
    case LINEAR: return sizeof(Linear);
    case DENSE: return sizeof(Dense);
    default: return 0;
  }
}

// Bytes of scratch that each row of an operation needs.
int64_t aiakq_scratch(const Op* op) {
  aiakq_isa();
  switch (op->kind) {
    case LINEAR: return used->linear_scratch(*(const Linear*)op);
    case DENSE: return used->dense_scratch(*(const Dense*)op);
    default: return 0;
  }
}

// One operation after the other on ``threads`` threads.
void aiakq_run(const Op* const* ops, int64_t count, int32_t threads) {
  aiakq_isa();
  Shared shared = {};
  auto work = [&](int32_t rank, int32_t size) {
    const Team team = {rank, size, &shared};
    for (int64_t i = 0; i < count; i++) used->bodies[ops[i]->kind](ops[i], team);
  };
  if (threads == 1) return work(0, 1);
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num(), omp_get_num_threads());
}

}  // extern "C"
