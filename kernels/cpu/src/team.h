// The threads that work on a list of operations together.
//
// Operations are phases, one after the other, and a phase is items that do not depend on each other. Nobody waits for a
// thread, only for items: whoever is there takes the next one, and the phase is over when the last has been worked on.
// A thread that the system has not let run for a while finds the others further on and follows them.

#pragma once

#include <cstdint>

#include "simd.h"

namespace aiakq {

// What all threads of a team see; each number on a cache line of its own.
struct Shared {
  alignas(64) uint64_t now;  // the phase in the upper half, its next item in the lower one
  alignas(64) int64_t done;  // items of the phase that have been worked on
};

struct Team {
  int32_t rank, size;
  Shared* shared;
  uint32_t phase;  // this thread's
};

// Gives the processor to another thread; in library.cpp.
void let_others_run();

namespace ISA {

INLINE void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// One phase: work(item) for each of ``count`` items, on whichever threads are there, ``chunk`` items at a time. Returns
// when all of it is done, and what any thread wrote is seen by this one. All threads of a team come with the same count
// and chunk; one that may not ``help`` only waits.
template <class Work> INLINE void share(Team& team, int64_t count, int64_t chunk, Work work, bool help = true) {
  if (team.size == 1) {
    for (int64_t item = 0; item < count; item++) work(item);
    return;
  }
  Shared& s = *team.shared;
  const uint32_t phase = team.phase++;
  const uint64_t next_phase = (uint64_t)(phase + 1) << 32;
  for (int spins = 0;;) {
    uint64_t now = __atomic_load_n(&s.now, __ATOMIC_ACQUIRE);
    if ((uint32_t)(now >> 32) != phase) return;
    const int64_t first = (uint32_t)now;
    if (count == 0) {
      __atomic_compare_exchange_n(&s.now, &now, next_phase, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
      return;
    }
    if (first >= count || !help) {
      // Somebody else may need this core to finish an item.
      spins++ < 4000 ? pause() : let_others_run();
      continue;
    }
    const int64_t stop = least(first + chunk, count);
    if (!__atomic_compare_exchange_n(&s.now, &now, now + (stop - first), true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
      continue;
    for (int64_t item = first; item < stop; item++) work(item);
    if (__atomic_add_fetch(&s.done, stop - first, __ATOMIC_ACQ_REL) < count) continue;
    __atomic_store_n(&s.done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&s.now, next_phase, __ATOMIC_RELEASE);
    return;
  }
}

// Items to take at a time: few enough that the last ones are shared out evenly.
INLINE int64_t chunk_of(const Team& team, int64_t count, int64_t most_at_once) {
  return most(1, least(most_at_once, count / (8 * team.size)));
}

}  // namespace ISA

using Body = void (*)(const void* op, Team& team);

}  // namespace aiakq
