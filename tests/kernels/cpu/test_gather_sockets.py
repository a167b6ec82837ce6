"""Gathering over sockets: every rank gets the columns of all; an interruption ends waiting, and what was on its way
then is not taken for later columns; a late or lost rank is named.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from aiakq.kernels.cpu import gather
from aiakq.kernels.cpu.gather_sockets import SocketCollective, Stream
from aiakq.kernels.cpu.recording import Recording

LIMIT = 20.0


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    return one, two


@pytest.fixture(params=[unix_pair, tcp_pair], ids=["unix", "tcp"])
def collectives(request, native) -> Iterator[Callable[..., list[SocketCollective]]]:
    """``collectives(size, time_limit)`` -> the ranks of a new group, which live in this process."""
    made: list[Stream] = []

    def make(size: int, time_limit: float = LIMIT) -> list[SocketCollective]:
        streams: list[dict[int, Stream]] = [{} for _ in range(size)]
        for high in range(size):
            for low in range(high):
                data, alarm = request.param(), request.param()
                streams[low][high], streams[high][low] = Stream(data[0], alarm[0]), Stream(data[1], alarm[1])
                made.extend((streams[low][high], streams[high][low]))
        return [SocketCollective(streams[rank], rank, size, time_limit) for rank in range(size)]

    yield make
    for stream in made:
        for sock in stream:
            sock.close()


def on_all(work: Callable[[int], object], size: int) -> list[object]:
    """``work(rank)`` on a thread for each rank."""
    results: list[object] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounds", [[0, 32, 50], [0, 0, 7], [0, 7, 7], [0, 64, 64, 96, 130]])
@pytest.mark.parametrize("m", [1, 5, 300])
def test_every_rank_gets_the_columns_of_all(collectives, dtype, bounds, m):
    ranks = collectives(len(bounds) - 1)
    whole = torch.randn(m, bounds[-1]).to(dtype)

    def work(rank: int) -> list[Tensor]:
        own = whole[:, bounds[rank] : bounds[rank + 1]]
        return [ranks[rank].gather(own if turn % 2 else own.contiguous(), bounds) for turn in range(7)]

    for results in on_all(work, len(ranks)):
        assert all(torch.equal(result, whole) for result in results)


@pytest.mark.parametrize("m, n", [(40, 33), (1, 4000), (3, 1000)], ids=["rows", "one row", "both"])
def test_what_is_larger_than_the_buffer_goes_through_it_in_parts(collectives, monkeypatch, m, n):
    monkeypatch.setattr(gather, "BUFFER_BYTES", 1024)
    ranks, bounds = collectives(3), [0, n // 3, n // 2, n]
    whole = torch.randn(m, n)

    def work(rank: int) -> Tensor:
        return ranks[rank].gather(whole[:, bounds[rank] : bounds[rank + 1]], bounds)

    assert all(torch.equal(result, whole) for result in on_all(work, 3))


def test_columns_that_fill_every_socket_arrive(collectives):
    """Two ranks that only sent at first would wait for each other."""
    ranks, bounds = collectives(3), [0, 700, 1400, 2048]
    whole = torch.randn(2000, 2048)

    def work(rank: int) -> Tensor:
        return ranks[rank].gather(whole[:, bounds[rank] : bounds[rank + 1]], bounds)

    assert all(torch.equal(result, whole) for result in on_all(work, 3))


def test_recorded_gathers_meet_again(collectives):
    ranks, bounds = collectives(2), [0, 32, 64]
    whole = torch.randn(3, 64)

    def work(rank: int) -> Tensor:
        own = whole[:, bounds[rank] : bounds[rank + 1]].contiguous()
        with Recording() as recording:
            result = ranks[rank].gather(own, bounds)
        recording.op_list()(2)
        return result.clone()

    assert all(torch.equal(result, whole) for result in on_all(work, 2))


def test_a_late_rank_is_named(collectives):
    ranks = collectives(3, time_limit=0.3)

    def work(rank: int) -> float:
        began = time.monotonic()
        if rank != 2:
            ranks[rank].gather(torch.ones(1, 1), [0, 1, 2, 3])
        return time.monotonic() - began

    waited = on_all(work, 3)
    assert all(0.25 < seconds < 5 for seconds in waited[:2])
    assert [rank.late_rank for rank in ranks] == [2, 2, None]
    assert ranks[0].is_given_up and ranks[0].lost_rank is None


def test_a_lost_rank_is_named_at_once(collectives):
    ranks = collectives(3)

    def work(rank: int) -> float:
        began = time.monotonic()
        if rank == 1:
            time.sleep(0.1)
            ranks[1].give_up()  # its connections end
        else:
            ranks[rank].gather(torch.ones(1, 1), [0, 1, 2, 3])
        return time.monotonic() - began

    assert max(on_all(work, 3)) < 5
    assert [ranks[0].lost_rank, ranks[2].lost_rank] == [1, 1] and ranks[0].late_rank is None
    ranks[0].gather(torch.ones(1, 1), [0, 1, 2, 3])  # and nothing waits again


def test_waiting_ends_when_this_rank_gives_up(collectives):
    ranks = collectives(2)
    waiting = threading.Thread(target=ranks[0].gather, args=(torch.ones(1, 1), [0, 1, 2]))
    waiting.start()
    time.sleep(0.1)
    ranks[0].give_up()
    waiting.join(5)
    assert not waiting.is_alive() and ranks[0].is_given_up


@pytest.mark.parametrize("m", [1, 900], ids=["small", "large"])
def test_ranks_start_over_after_interruptions(collectives, m):
    """Rank 2 leaves out a gather that the others are in the middle of; nothing of it is left afterwards."""
    ranks, bounds = collectives(3), [0, 500, 1000, 2000]
    whole = torch.randn(m, 2000)
    for turn in range(12):

        def work(rank: int, turn: int = turn) -> Tensor | None:
            own = whole[:, bounds[rank] : bounds[rank + 1]]
            for count in range(2):
                result = ranks[rank].gather(own + turn + count, bounds)
                if ranks[rank].is_given_up:  # rank 2 was that fast
                    return None
                assert torch.equal(result, whole + turn + count)
            if rank == 2:
                time.sleep(0.003 * (turn % 3))
                ranks[2].interrupt()
            else:
                ranks[rank].gather(own - 1, bounds)
            return None

        on_all(work, 3)
        assert all(rank.is_given_up and rank.lost_rank is None and rank.late_rank is None for rank in ranks)
        for rank in (1, 2, 0):
            ranks[rank].interrupt()
            ranks[rank].start_over()
        assert not any(rank.is_given_up for rank in ranks)


def test_bytes_that_no_rank_sends_lose_it(collectives):
    first, second = collectives(2)
    second._streams[0].data.sendall(b"\xff" * 40)
    first.gather(torch.ones(1, 1), [0, 1, 2])
    assert first.lost_rank == 1


CHILD = """
import socket, sys, torch
from aiakq.kernels.cpu.gather_sockets import SocketCollective, Stream
torch.set_num_threads(1)
data, alarm = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
rank = SocketCollective({0: Stream(data, alarm)}, 1, 2, 20.0)
for number in range(10**9):
    rank.gather(torch.full((3, 40), float(number)), [0, 30, 70])
    if rank.is_given_up: break
"""


@pytest.mark.parametrize("make", [unix_pair, tcp_pair])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_process_that_ends_or_hangs_is_named(native, make, how):
    data, alarm = make(), make()
    inherited = (data[1].fileno(), alarm[1].fileno())
    process = subprocess.Popen([sys.executable, "-P", "-c", CHILD, *map(str, inherited)], pass_fds=inherited)
    for pair in (data, alarm):
        pair[1].close()
    first = SocketCollective({1: Stream(data[0], alarm[0])}, 0, 2, 20.0)
    try:
        for number in range(200):
            result = first.gather(torch.full((3, 30), -float(number)), [0, 30, 70])
            assert result[:, :30].eq(-number).all() and result[:, 30:].eq(number).all()
        first._group.time_limit = 400
        began = time.monotonic()
        os.kill(process.pid, how)
        while not first.is_given_up and time.monotonic() - began < 10:
            first.gather(torch.ones(3, 30), [0, 30, 70])
        assert time.monotonic() - began < 5
        assert (first.lost_rank if how == signal.SIGKILL else first.late_rank) == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        data[0].close()
        alarm[0].close()
