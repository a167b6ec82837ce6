// The threads that work on a list of operations together.

#pragma once

#include <cstdint>

#include "simd.h"

namespace aiakq {

// What all threads of a team see; each number on a cache line of its own.
struct Shared {
  alignas(64) int32_t waiting;
  alignas(64) int32_t round;
  alignas(64) int64_t next;
};

struct Team {
  int32_t rank, size;
  Shared* shared;
};

// Gives the processor to another thread; in library.cpp.
void let_others_run();

namespace ISA {

// Waits until every thread of the team is here. What any of them wrote before is then seen by all.
INLINE void sync(const Team& team) {
  Shared& s = *team.shared;
  if (team.size == 1) {
    s.next = 0;
    return;
  }
  const int32_t round = __atomic_load_n(&s.round, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&s.waiting, 1, __ATOMIC_ACQ_REL) == team.size) {
    s.waiting = 0;
    s.next = 0;
    __atomic_store_n(&s.round, round + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int spins = 0; __atomic_load_n(&s.round, __ATOMIC_ACQUIRE) == round; spins++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    // Somebody else may need this core to get there.
    if (spins > 4000) let_others_run();
  }
}

// The first of the next ``count`` pieces of work that nobody has taken; starts at 0 after every sync.
INLINE int64_t take(const Team& team, int64_t count) {
  return __atomic_fetch_add(&team.shared->next, count, __ATOMIC_RELAXED);
}

}  // namespace ISA

using Body = void (*)(const void* op, const Team& team);

}  // namespace aiakq
