// All-gather of columns over non-blocking sockets: every rank sends its columns to all others.
//
// A message is a header and one rank's columns of a part. All messages are sent and received concurrently, as sockets
// become ready: no rank waits for another one to read before it reads itself.
//
// A rank that leaves an exchange early, because the group was interrupted, may have sent or received partial messages.
// Messages carry an epoch, which is incremented when the ranks start over: the next exchange first sends the rest of an
// unfinished message and skips everything received from earlier epochs.

#include "exchange.h"

#include <cerrno>
#include <cstring>
#include <initializer_list>

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

namespace aiakq {
namespace {

// Number of retries before the thread sleeps, and the duration of each sleep in milliseconds.
constexpr int TURNS = 50, SLEEP = 5;

struct Header {
  int64_t epoch, number, first, columns, bytes;
};
constexpr int64_t HEAD = sizeof(Header);

// The state of a connection, kept between exchanges.
struct State {
  Header out, in;
  int64_t sent, to_send;  // bytes of the message ``out``, with its header
  int64_t received;       // bytes of the message ``in``, with its header
  Columns columns;        // of the last exchange, once it was over
};
static_assert(sizeof(State) <= STREAM_BYTES, "allocated by Python");

State& state_of(const RankGroup& group, int32_t rank) { return *(State*)group.streams[rank].state; }

// What one exchange sends and expects.
struct Exchange {
  RankGroup& group;
  const Header own;
  const int64_t rows, columns, size;

  bool is_current(const Header& header) const {
    return header.epoch == own.epoch && header.number == own.number;
  }
  uint8_t* block(int64_t first) const { return group.buffers + rows * first * size; }
  // Whether a received header is valid for its sender.
  bool is_valid(const Header& header) const {
    if (header.bytes < 0 || header.bytes > group.buffer_bytes || header.epoch > own.epoch) return false;
    if (header.epoch < own.epoch) return true;
    return header.number == own.number && header.first >= 0 && header.first <= columns && header.columns >= 0 &&
           header.columns <= columns - header.first && header.bytes == rows * header.columns * size;
  }
};

enum class Progress { DONE, SOME, NONE, LOST };

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// Sends as much as the socket accepts: the rest of an unfinished message, then this one.
Progress send_some(const Exchange& exchange, const RankStream& stream) {
  State& state = *(State*)stream.state;
  Progress progress = Progress::NONE;
  for (;;) {
    if (state.sent == state.to_send) {
      if (state.to_send && exchange.is_current(state.out)) return Progress::DONE;
      state.out = exchange.own;
      state.sent = 0;
      state.to_send = HEAD + state.out.bytes;
    }
    uint8_t* data = exchange.is_current(state.out) ? exchange.block(state.out.first) : exchange.group.buffers;
    const int64_t head = max(0, HEAD - state.sent), begin = max(0, state.sent - HEAD);
    iovec parts[2] = {
        {(uint8_t*)&state.out + state.sent, (size_t)head}, {data + begin, (size_t)(state.out.bytes - begin)}};
    msghdr message = {};
    message.msg_iov = parts + (head ? 0 : 1);
    message.msg_iovlen = head ? 2 : 1;
    const ssize_t count = sendmsg(stream.data, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) return would_block() ? progress : Progress::LOST;
    state.sent += count;
    progress = Progress::SOME;
  }
}

// Receives what has arrived, up to the end of this exchange's message.
Progress receive_some(const Exchange& exchange, const RankStream& stream) {
  State& state = *(State*)stream.state;
  Progress progress = Progress::NONE;
  uint8_t skipped[4096];
  for (;;) {
    const bool has_head = state.received >= HEAD;
    const int64_t left = HEAD + (has_head ? state.in.bytes : 0) - state.received;
    if (has_head && left == 0) {
      if (exchange.is_current(state.in)) return Progress::DONE;
      state.received = 0;
      continue;
    }
    const bool skip = has_head && !exchange.is_current(state.in);
    uint8_t* to = !has_head ? (uint8_t*)&state.in + state.received
                  : skip    ? skipped
                            : exchange.block(state.in.first) + state.received - HEAD;
    const ssize_t count = recv(stream.data, to, skip ? min(left, (int64_t)sizeof skipped) : left, MSG_DONTWAIT);
    if (count == 0) return Progress::LOST;
    if (count < 0) return would_block() ? progress : Progress::LOST;
    state.received += count;
    progress = Progress::SOME;
    if (!has_head && state.received == HEAD && !exchange.is_valid(state.in)) return Progress::LOST;
  }
}

// Reads an alarm socket.
void hear(const RankGroup& group, int32_t rank) {
  uint8_t epochs[64];
  const ssize_t count = recv(group.streams[rank].alarm, epochs, sizeof epochs, MSG_DONTWAIT);
  if (count == 0 || (count < 0 && !would_block())) return give_up(group, LOST + rank);
  for (ssize_t i = 0; i < count; i++)
    if (epochs[i] == (uint8_t)group.epoch) give_up(group, INTERRUPTED);
}

// Sleeps until a socket is ready again, and checks the alarms.
void sleep_and_hear(const RankGroup& group, const bool* has_sent, const bool* has_received) {
  pollfd files[2 * MAX_STREAMS];
  int32_t ranks[2 * MAX_STREAMS], count = 0;
  for (int32_t rank = 0; rank < group.size; rank++) {
    if (rank == group.rank) continue;
    const short events = (has_sent[rank] ? 0 : POLLOUT) | (has_received[rank] ? 0 : POLLIN);
    // Connections that are done are skipped: their end is detected when data is expected from them.
    files[count] = {events ? group.streams[rank].data : -1, events, 0};
    ranks[count++] = rank;
    files[count] = {group.streams[rank].alarm, POLLIN, 0};
    ranks[count++] = rank;
  }
  if (poll(files, count, SLEEP) <= 0) return;
  for (int32_t i = 1; i < count; i += 2)
    if (files[i].revents) hear(group, ranks[i]);
}

// Sends to and receives from every rank once, without blocking. ``waits_for``: a rank that is not done; -1: none.
Progress turn(const Exchange& exchange, bool* has_sent, bool* has_received, int32_t& waits_for) {
  const RankGroup& group = exchange.group;
  Progress all = Progress::NONE;
  waits_for = -1;
  for (int32_t rank = group.size - 1; rank >= 0; rank--) {
    if (rank == group.rank) continue;
    for (bool sends : {true, false}) {
      bool& done = sends ? has_sent[rank] : has_received[rank];
      if (done) continue;
      const Progress one = (sends ? send_some : receive_some)(exchange, group.streams[rank]);
      if (one == Progress::LOST) {
        give_up(group, LOST + rank);
        return one;
      }
      done = one == Progress::DONE;
      if (one != Progress::NONE) all = Progress::SOME;
      // Prefer a rank whose columns are missing to one that does not accept ours.
      if (!done && (!sends || waits_for < 0)) waits_for = rank;
    }
  }
  return waits_for < 0 ? Progress::DONE : all;
}

}  // namespace

void exchange(RankGroup& group, int64_t rows, int64_t columns, int64_t size, const Columns& own) {
  const int64_t number = ++group.num_barriers;
  const Header header = {group.epoch, number, own.first, own.count, rows * own.count * size};
  const Exchange exchange = {group, header, rows, columns, size};
  bool has_sent[MAX_STREAMS] = {}, has_received[MAX_STREAMS] = {};
  for (int32_t rank = 0; rank < group.size; rank++) {
    if (rank == group.rank) continue;
    State& state = state_of(group, rank);
    state.columns = {0, 0};
    if (state.received >= HEAD && state.received == HEAD + state.in.bytes) state.received = 0;
  }
  int64_t until = 0;
  for (int turns = 0;; turns++) {
    if (given_up(group)) return;
    int32_t waits_for;
    const Progress progress = turn(exchange, has_sent, has_received, waits_for);
    if (progress == Progress::DONE) break;
    if (progress == Progress::LOST) return;
    if (progress == Progress::SOME) turns = 0, until = 0;
    if (turns < TURNS) {
      sched_yield();
      continue;
    }
    const int64_t now = milliseconds();
    if (!until) until = now + group.time_limit;
    if (now > until) return give_up(group, LATE + waits_for);
    sleep_and_hear(group, has_sent, has_received);
  }
  for (int32_t rank = 0; rank < group.size; rank++) {
    if (rank == group.rank) continue;
    State& state = state_of(group, rank);
    state.columns = {state.in.first, state.in.columns};
  }
}

Columns received(const RankGroup& group, int32_t rank) { return state_of(group, rank).columns; }

}  // namespace aiakq
