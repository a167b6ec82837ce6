// All-gather of activation shards, one from each rank of a group, through shared memory.
//
// Every rank writes its columns into a buffer, waits until all have done so, and reads the result. Two buffers
// alternate: a rank may write into one while others still read the other, and no rank is ever two barriers ahead.
// Tensors larger than a buffer are transferred in parts.
//
// The barrier is lock-free: each rank publishes the number of barriers that it has reached and waits for the others,
// first spinning, then sleeping until a number changes. Waiting ends early when the group is given up, permanently; a
// rank that waits longer than the time limit gives up the group itself and names the late rank. Later operations return
// quickly with undefined results; the caller checks the first number of ``control``.

//
// Ranks that share no memory exchange their columns over sockets; see exchange.cpp.

#include <cstring>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "exchange.h"
#include "kernels.h"
#include "parallel.h"

namespace aiakq {
namespace ISA {
namespace {

// Bytes copied per work item.
constexpr int64_t COPIED = 1 << 16;
constexpr int SPINS = 2000, YIELDS = 50;

// Sleeps while *number equals ``seen``, for at most a few milliseconds.
void sleep_while(int32_t* number, int32_t seen) {
  timespec limit = {0, 5000000};
#if defined(__linux__)
  syscall(SYS_futex, number, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  limit.tv_nsec = 50000;
  nanosleep(&limit, nullptr);
#endif
}

void wake(int32_t* number) {
#if defined(__linux__)
  syscall(SYS_futex, number, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#endif
}

void wait_for(RankGroup& group, int32_t rank, int32_t barrier) {
  int32_t* line = group.control + (1 + rank) * CONTROL_LINE;
  int64_t until = 0;
  for (int turn = 0;; turn++) {
    const int32_t seen = __atomic_load_n(line, __ATOMIC_ACQUIRE);
    // Numbers may wrap around.
    if ((int32_t)((uint32_t)seen - (uint32_t)barrier) >= 0 || given_up(group)) return;
    if (turn < SPINS) {
      spin_pause();
    } else if (turn < SPINS + YIELDS) {
      yield_thread();
    } else {
      const int64_t now = milliseconds();
      if (!until) until = now + group.time_limit;
      if (now > until) return give_up(group, LATE + rank);
      // The other rank reads this number after publishing its own, so at least one of the two sees the other's.
      __atomic_add_fetch(line + 1, 1, __ATOMIC_SEQ_CST);
      sleep_while(line, seen);
      __atomic_sub_fetch(line + 1, 1, __ATOMIC_SEQ_CST);
    }
  }
}

void wait_for_all(RankGroup& group) {
  const int32_t barrier = (int32_t)(uint32_t)++group.num_barriers;
  int32_t* own = group.control + (1 + group.rank) * CONTROL_LINE;
  __atomic_store_n(own, barrier, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(own + 1, __ATOMIC_SEQ_CST)) wake(own);
  for (int32_t rank = 0; rank < group.size; rank++)
    if (rank != group.rank) wait_for(group, rank, barrier);
}

// Copies ``rows`` rows of ``bytes`` bytes, from(row) to to(row).
template <class From, class To> void copy_rows(Worker& worker, int64_t rows, int64_t bytes, From from, To to) {
  const int64_t across = ceil_div(bytes, COPIED), rows_per_item = max(1, COPIED / max(1, bytes));
  parallel_for(worker, ceil_div(rows, rows_per_item) * across, 1, [&](int64_t item) {
    const int64_t begin = item % across * COPIED, size = min(COPIED, bytes - begin);
    const int64_t first = item / across * rows_per_item;
    for (int64_t row = first; row < min(first + rows_per_item, rows); row++) memcpy(to(row) + begin, from(row) + begin, size);
  });
}

// The same as gather for ranks without shared memory. In the buffer, the columns of each rank are contiguous.
void gather_over_sockets(const Gather& op, Worker& worker) {
  RankGroup& group = *op.group;
  const int64_t size = op.type == FLOAT32 ? 4 : 2;
  const int64_t wide = min(op.n, group.buffer_bytes / size), high = max(1, group.buffer_bytes / (wide * size));
  const uint8_t* x = (const uint8_t*)op.x;
  uint8_t* y = (uint8_t*)op.y;
  for (int64_t top = 0; top < op.m; top += high) {
    for (int64_t left = 0; left < op.n; left += wide) {
      const int64_t rows = min(high, op.m - top), columns = min(wide, op.n - left);
      const int64_t begin = max(op.first, left), end = min(op.first + op.columns, left + columns);
      const Columns own = {end > begin ? begin - left : 0, max(0, end - begin)};
      auto line = [&](const Columns& part, int64_t row) {
        return group.buffers + (rows * part.first + row * part.count) * size;
      };
      copy_rows(
          worker, rows, own.count * size,
          [&](int64_t row) { return x + ((top + row) * op.x_stride + begin - op.first) * size; },
          [&](int64_t row) { return line(own, row); });
      parallel_for(worker, 1, 1, [&](int64_t) { exchange(group, rows, columns, size, own); });
      // An item is some rows of one rank. Their columns are read inside the loop: a late thread skips it, and the
      // others may already be in the next exchange.
      const int64_t rows_per_item = max(1, COPIED / max(1, columns * size / group.size));
      parallel_for(worker, ceil_div(rows, rows_per_item) * group.size, 1, [&](int64_t item) {
        const int32_t rank = (int32_t)(item % group.size);
        const Columns part = rank == group.rank ? own : received(group, rank);
        const int64_t first = item / group.size * rows_per_item;
        for (int64_t row = first; row < min(first + rows_per_item, rows); row++)
          memcpy(y + ((top + row) * op.y_stride + left + part.first) * size, line(part, row), part.count * size);
      });
    }
  }
}

}  // namespace

void gather(const Gather& op, Worker& worker) {
  RankGroup& group = *op.group;
  if (group.streams) return gather_over_sockets(op, worker);
  const int64_t size = op.type == FLOAT32 ? 4 : 2;
  const int64_t wide = min(op.n, group.buffer_bytes / size), high = max(1, group.buffer_bytes / (wide * size));
  const uint8_t* x = (const uint8_t*)op.x;
  uint8_t* y = (uint8_t*)op.y;
  for (int64_t top = 0; top < op.m; top += high) {
    for (int64_t left = 0; left < op.n; left += wide) {
      const int64_t rows = min(high, op.m - top), columns = min(wide, op.n - left);
      // This rank's columns of the part.
      const int64_t first = max(op.first, left), end = min(op.first + op.columns, left + columns);
      // Recomputed while copying, because there is a barrier in between.
      auto line = [&](int64_t barrier, int64_t row) {
        return group.buffers + barrier % 2 * group.buffer_bytes + row * columns * size;
      };
      copy_rows(
          worker, rows, max(0, end - first) * size,
          [&](int64_t row) { return x + ((top + row) * op.x_stride + first - op.first) * size; },
          [&](int64_t row) { return line(group.num_barriers, row) + (first - left) * size; });
      parallel_for(worker, 1, 1, [&](int64_t) { wait_for_all(group); });
      copy_rows(
          worker, rows, columns * size, [&](int64_t row) { return line(group.num_barriers - 1, row); },
          [&](int64_t row) { return y + ((top + row) * op.y_stride + left) * size; });
    }
  }
}

}  // namespace ISA
}  // namespace aiakq
