// Common helpers: inlining, unrolling, and size arithmetic.

#pragma once

#include <cstdint>

// Functions in headers are static and inlined: files are compiled for different instruction sets, and the linker must
// never merge copies compiled for different ones.
//
// UNROLL marks loops over accumulators that must stay in registers.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNROLL  // sanitizers check every load: unrolling would make compilation take half an hour
#define INLINE [[maybe_unused]] static inline
#define INLINE_LAMBDA
#else
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#endif
#define NOINLINE __attribute__((noinline))

namespace aiakq {

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

}  // namespace aiakq
