// Functions for groups of ranks with or without shared memory, and the exchange of columns over sockets.

#pragma once

#include <ctime>

#include "common.h"
#include "ops.h"

namespace aiakq {

INLINE int64_t milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

INLINE bool given_up(const RankGroup& group) { return __atomic_load_n(group.control, __ATOMIC_ACQUIRE) != 0; }

INLINE void give_up(const RankGroup& group, int32_t reason) {
  int32_t none = 0;
  __atomic_compare_exchange_n(group.control, &none, reason, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

// Columns of a part of an activation.
struct Columns {
  int64_t first, count;
};

// Sends ``rows`` x own.count elements of ``size`` bytes to every other rank, and receives theirs. In the buffer of the
// group, the columns of each rank begin at rows * first elements; all of them have ``columns`` columns.
void exchange(RankGroup& group, int64_t rows, int64_t columns, int64_t size, const Columns& own);

// The columns received from ``rank`` in the last exchange; none if the group was given up before it finished.
Columns received(const RankGroup& group, int32_t rank);

}  // namespace aiakq
