// The library's C interface: which instruction set is used, and running lists of operations.

#include <sched.h>

#include <cstring>

#if defined(_OPENMP)
#include <omp.h>
#else
#include <system_error>
#include <thread>
#include <vector>
#endif

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

const Table* best() {
  for (const Table* table : TABLES)
    if (runs_here(table)) return table;
  return &portable::table;
}

const Table* used = best();

// work(rank, size) once on each of at most ``threads`` threads, all at the same time.
template <class Work> void together(int32_t threads, Work work) {
  if (threads <= 1) return work(0, 1);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num(), omp_get_num_threads());
#else
  // Without torch's OpenMP: threads of our own, which begin when it is known how many there are.
  int32_t size = 0;
  auto wait_and_work = [&](int32_t rank) {
    while (!__atomic_load_n(&size, __ATOMIC_ACQUIRE)) sched_yield();
    work(rank, size);
  };
  std::vector<std::thread> others;
  try {
    for (int32_t rank = 1; rank < threads; rank++) others.emplace_back(wait_and_work, rank);
  } catch (const std::system_error&) {  // the machine gives no more
  }
  __atomic_store_n(&size, (int32_t)others.size() + 1, __ATOMIC_RELEASE);
  work(0, size);
  for (std::thread& other : others) other.join();
#endif
}

}  // namespace
}  // namespace aiakq

using namespace aiakq;

#ifndef AIAKQ_ABI
#define AIAKQ_ABI ""
#endif

#pragma GCC visibility push(default)
extern "C" {

// Which interface this was built with: a hash by build.py, empty if built in another way.
const char* aiakq_abi() { return AIAKQ_ABI; }

// The instruction set in use.
const char* aiakq_isa() { return used->name; }

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
    case EMBEDDING: return sizeof(Embedding);
    case NORM: return sizeof(Norm);
    case GATE: return sizeof(Gate);
    case SAMPLE: return sizeof(Sample);
    case ROTARY: return sizeof(Rotary);
    case ATTENTION: return sizeof(Attention);
    case FEEDBACK: return sizeof(Feedback);
    default: return 0;
  }
}

// Bytes of scratch that each row of an operation needs; each thread for ATTENTION.
int64_t aiakq_scratch(const Op* op) {
  switch (op->kind) {
    case LINEAR: return used->linear_scratch(*(const Linear*)op);
    case DENSE: return used->dense_scratch(*(const Dense*)op);
    case ATTENTION: return used->attention_scratch(*(const Attention*)op);
    default: return 0;
  }
}

// One operation after the other on ``threads`` threads.
void aiakq_run(const Op* const* ops, int64_t count, int32_t threads) {
  Shared shared = {};
  together(threads, [&](int32_t rank, int32_t size) {
    Team team = {rank, size, &shared, 0};
    for (int64_t i = 0; i < count; i++) used->bodies[ops[i]->kind](ops[i], team);
  });
}

}  // extern "C"
#pragma GCC visibility pop
