// The library's C interface: describes its operations, selects an instruction set, and runs operations.

#include <sched.h>

#include <cstddef>
#include <cstring>
#include <string>

#if defined(_OPENMP)
#include <omp.h>
#else
#include <system_error>
#include <thread>
#include <vector>
#endif

#include "dispatch.h"

namespace aiakq {

#define DECLARE(isa)                \
  namespace isa {                   \
  extern const KernelTable table;   \
  }
DECLARE(portable)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(vnni)
#endif

void yield_thread() { sched_yield(); }

bool use_bf16_products = false;

namespace {

// What the bits of results depend on: the kernels, and whether bfloat16 dot products are used.
struct InstructionSet {
  const char* name;
  const KernelTable* kernels;
  bool bf16_products;
};

// Best first.
const InstructionSet INSTRUCTION_SETS[] = {
#if defined(__x86_64__)
    {"vnni_bf16", &vnni::table, true},
    {"vnni", &vnni::table, false},
    {"avx512", &avx512::table, false},
    {"avx2", &avx2::table, false},
#endif
    {"portable", &portable::table, false},
};

bool is_supported(const InstructionSet& set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const KernelTable* table = set.kernels;
  if (set.bf16_products && !(BF16_PRODUCTS && __builtin_cpu_supports("avx512bf16"))) return false;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (table == &avx2::table) return avx2;
  if (table == &avx512::table) return avx512;
  if (table == &vnni::table) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
  return true;
}

const InstructionSet* current;

void use(const InstructionSet& set) {
  current = &set;
  use_bf16_products = set.bf16_products;
}

const bool chosen = [] {
  for (const InstructionSet& set : INSTRUCTION_SETS)
    if (is_supported(set)) {
      use(set);
      break;
    }
  return true;
}();

// Calls work(rank, count) once on each of ``count`` <= ``threads`` threads concurrently.
template <class Work> void parallel(int32_t threads, Work work) {
  if (threads <= 1) return work(0, 1);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num(), omp_get_num_threads());
#else
  // Without torch's OpenMP runtime, start threads here; they begin to work once their number is known.
  int32_t count = 0;
  auto wait_and_work = [&](int32_t rank) {
    while (!__atomic_load_n(&count, __ATOMIC_ACQUIRE)) sched_yield();
    work(rank, count);
  };
  std::vector<std::thread> others;
  try {
    for (int32_t rank = 1; rank < threads; rank++) others.emplace_back(wait_and_work, rank);
  } catch (const std::system_error&) {  // no more threads available
  }
  __atomic_store_n(&count, (int32_t)others.size() + 1, __ATOMIC_RELEASE);
  work(0, count);
  for (std::thread& other : others) other.join();
#endif
}

template <class T> constexpr const char* TYPE = "pointer";
template <> constexpr const char* TYPE<int32_t> = "int32";
template <> constexpr const char* TYPE<int64_t> = "int64";
template <> constexpr const char* TYPE<float> = "float";
template <> constexpr const char* TYPE<double> = "double";

// The description that aiakq_ops returns, as JSON.
class Description {
 public:
  template <class T> void begin(const char* name, const char* kind) {
    structs += separator(structs) + quoted(name) + ": {\"kind\": " + kind + ", \"size\": " + std::to_string(sizeof(T)) +
               ", \"fields\": [";
    in_struct = first = true;
  }
  template <class Field> void field(const char* name, size_t offset) {
    structs += (first ? "[" : ", [") + quoted(name) + ", " + quoted(TYPE<Field>) + ", " + std::to_string(offset) + "]";
    first = false;
  }
  void end() {
    if (in_struct) structs += "]}";
    in_struct = false;
  }
  void constant(const char* name, int64_t value) {
    constants += separator(constants) + quoted(name) + ": " + std::to_string(value);
  }
  std::string text() const { return "{\"structs\": {" + structs + "}, \"constants\": {" + constants + "}}"; }

 private:
  std::string structs, constants;
  bool in_struct = false, first = true;
  static std::string quoted(const std::string& word) { return '"' + word + '"'; }
  static std::string separator(const std::string& before) { return before.empty() ? "" : ", "; }
};

std::string describe() {
  Description description;
#define BEGIN(name, Name, kind)                \
  {                                            \
    using Struct = Name;                       \
    description.begin<Struct>(name, kind);
#define OP(name, Name)                                                   \
  BEGIN(#name, Name, std::to_string(KIND_##name).c_str())                \
    description.field<int32_t>("kind", offsetof(Struct, kind));          \
    description.field<int32_t>("m", offsetof(Struct, m));
#define STRUCT(Name) BEGIN(#Name, Name, "null")
#define FIELD(type, name) description.field<type>(#name, offsetof(Struct, name));
#define ENUM(name) {
#define VALUE(name) description.constant(#name, name);
#define CONSTANT(name, value) description.constant(#name, name);
#define END          \
  description.end(); \
  }
#include "ops.def"
  return description.text();
}

}  // namespace
}  // namespace aiakq

using namespace aiakq;

#ifndef AIAKQ_ABI
#define AIAKQ_ABI ""
#endif

#pragma GCC visibility push(default)
extern "C" {

// Hash of the interface this library was built with, set by build.py; empty in other builds.
const char* aiakq_abi() { return AIAKQ_ABI; }

// The structs and constants of ops.def as JSON: {"structs": {name: {"kind": number or null, "size": bytes, "fields":
// [[name, type, offset], ...]}}, "constants": {name: value}}. Types are int32, int64, float, double and pointer.
const char* aiakq_ops() {
  static const std::string text = describe();
  return text.c_str();
}

// The instruction set in use.
const char* aiakq_isa() { return current->name; }

// Use the instruction set ``name``; false if this machine does not have it.
bool aiakq_use_isa(const char* name) {
  for (const InstructionSet& set : INSTRUCTION_SETS)
    if (!strcmp(set.name, name) && is_supported(set)) {
      use(set);
      return true;
    }
  return false;
}

// Bytes of scratch memory per row of an operation (attention: per thread). The maximum over all instruction sets of
// this machine, because another one may be selected later.
int64_t aiakq_scratch(const void* op) {
  int64_t bytes = 0;
  for (const InstructionSet& set : INSTRUCTION_SETS)
    if (is_supported(set)) bytes = max(bytes, set.kernels->scratch_bytes[*(const int32_t*)op](op));
  return bytes;
}

// Run operations one after the other on ``threads`` threads.
void aiakq_run(const void* const* ops, int64_t count, int32_t threads) {
  LoopState state = {};
  const KernelTable* const kernels = current->kernels;
  parallel(threads, [&](int32_t rank, int32_t workers) {
    Worker worker = {rank, workers, &state, 0};
    for (int64_t i = 0; i < count; i++) kernels->run[*(const int32_t*)ops[i]](ops[i], worker);
  });
}

}  // extern "C"
#pragma GCC visibility pop
