"""Workers as threads of one process, which is quick."""

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aiakq.quantizers.workers.messages import FirstChannel, ToWorker, Values, WorkerChannel
from aiakq.quantizers.workers.values import receive_values, send_values
from aiakq.quantizers.workers.worker import Worker
from aiakq.quantizers.workers.worker_group import FirstWorker


class SocketLink:
    def __init__(self, rank: int, channel: FirstChannel) -> None:
        self.rank = rank
        self.channel = channel

    def send(self, values: list[Any]) -> None:
        send_values(self.channel, values)

    def values(self) -> list[Any]:
        return receive_values(self.channel)


def run_together(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What ``work(workers)`` returns for each of ``size`` workers."""
    ends = [socket.socketpair() for _ in range(1, size)]
    first = FirstWorker([SocketLink(rank, FirstChannel(ends[rank - 1][0], Values)) for rank in range(1, size)])
    others = [Worker(WorkerChannel(ends[rank - 1][1], ToWorker), rank, size) for rank in range(1, size)]
    found: list[Any] = [None] * size
    problems: list[BaseException] = []

    def run(worker: Any) -> None:
        try:
            found[worker.rank] = work(worker)
        except BaseException as problem:
            problems.append(problem)
            for pair in ends:
                for end in pair:
                    end.shutdown(socket.SHUT_RDWR)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in (first, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for pair in ends:
        for end in pair:
            end.close()
    if problems:
        raise problems[0]
    return found


@pytest.fixture
def together() -> Callable[..., list[Any]]:
    """``together(size, work)``: what ``work(workers)`` returns for each of ``size`` workers."""
    return run_together
