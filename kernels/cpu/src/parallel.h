// Thread pool state for running a list of operations.
//
// An operation is one or more parallel loops. Threads wait for items, not for each other: each takes the next items of
// the current loop, and the loop ends when its last item is done. A thread that was descheduled for a while skips the
// loops that the others have finished without it.

#pragma once

#include "common.h"

namespace aiakq {

// State shared by all threads; each number has its own cache line.
struct LoopState {
  alignas(64) uint64_t next;  // the number of the current loop in the upper half, its next item in the lower
  alignas(64) int64_t done;   // items of the current loop that are done
};

// One thread of the team.
struct Worker {
  int32_t rank, count;  // index of this thread, and number of threads
  LoopState* state;
  uint32_t loop;  // the number of the next loop in this thread's count
};

// Yields the processor to another thread; defined in library.cpp.
void yield_thread();

INLINE void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Calls work(item) for every item from 0 to ``count``, ``chunk`` items at a time, on all workers that arrive. Returns
// when all items are done and their writes are visible. All workers must call it with the same count and chunk; a
// worker with ``help`` false only waits.
template <class Work>
INLINE void parallel_for(Worker& worker, int64_t count, int64_t chunk, Work work, bool help = true) {
  if (worker.count == 1) {
    for (int64_t item = 0; item < count; item++) work(item);
    return;
  }
  LoopState& state = *worker.state;
  const uint32_t loop = worker.loop++;
  const uint64_t next_loop = (uint64_t)(loop + 1) << 32;
  for (int spins = 0;;) {
    uint64_t next = __atomic_load_n(&state.next, __ATOMIC_ACQUIRE);
    if ((uint32_t)(next >> 32) != loop) return;
    const int64_t first = (uint32_t)next;
    if (count == 0) {
      __atomic_compare_exchange_n(&state.next, &next, next_loop, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
      return;
    }
    if (first >= count || !help) {
      // Another thread may need this core to finish an item.
      spins++ < 4000 ? spin_pause() : yield_thread();
      continue;
    }
    const int64_t stop = min(first + chunk, count);
    // Acquire and release: items see what earlier loops wrote.
    const uint64_t taken = next + (stop - first);
    if (!__atomic_compare_exchange_n(&state.next, &next, taken, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
    for (int64_t item = first; item < stop; item++) work(item);
    if (__atomic_add_fetch(&state.done, stop - first, __ATOMIC_ACQ_REL) < count) continue;
    // This thread did the last item. The release below publishes ``done`` together with the next loop.
    __atomic_store_n(&state.done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&state.next, next_loop, __ATOMIC_RELEASE);
    return;
  }
}

// Number of items to take at a time, at most ``max_chunk``: few enough to balance the load at the end of a loop.
INLINE int64_t chunk_size(const Worker& worker, int64_t count, int64_t max_chunk) {
  return max(1, min(max_chunk, count / (8 * worker.count)));
}

}  // namespace aiakq
