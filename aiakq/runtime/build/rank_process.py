"""The process of a rank other than 0: loads its share of the model, and executes rank 0's messages.

It is started by ``child_ranks`` with the descriptor of an inherited socket as its only argument. It ignores signals and
exits when rank 0 closes the socket.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

from aiakq.errors import WORKER, AiakqError, error, memory_error, one_line
from aiakq.runtime.distributed.messages import (
    Abandon,
    Alive,
    Configure,
    CountPages,
    Load,
    PagesCounted,
    RankChannel,
    RankFailed,
    RankLoaded,
    RankReady,
    ToRank,
    frame,
)
from aiakq.system.child import begin_child, exit_child
from aiakq.system.memory import freeze_objects

if TYPE_CHECKING:
    from aiakq.runtime.distributed.collectives import RankCollective
    from aiakq.runtime.distributed.rendezvous import Connections

#: Seconds to leave to rank 0 for detecting that another rank was lost.
_LOST_SECONDS = 5.0


def main() -> None:
    """Entry point of the child process; never returns."""
    run_and_exit(int(sys.argv[1]), lambda channel: run_rank(channel, _inherited))


def run_and_exit(file: int, run: Callable[[RankChannel], int]) -> NoReturn:
    """Call ``run`` with a channel over the socket with descriptor ``file``, and exit with the code that it returns."""
    begin_child()
    channel = RankChannel(socket.socket(fileno=file))
    try:
        code = run(channel)
    except OSError:  # rank 0 closed the connection while this rank was sending
        code = 0
    exit_child(code)


def run_rank(channel: RankChannel, connect: Callable[[Load], Connections]) -> int:
    """Load the model and execute messages; return the exit code. Raises OSError if rank 0 is gone.

    connect  returns the connections to the other ranks.
    """
    first = channel.receive_at_rank()
    if first is None:
        return 0
    assert isinstance(first, Load), "the first message says what to load"
    try:
        _follow(channel, first, connect)
    except AiakqError as failure:
        channel.send(frame(RankFailed(failure.id, failure.plain_fields)))
        return failure.exit_code
    except OSError:
        raise
    except BaseException as failure:
        if lacking := memory_error(failure):
            channel.send(frame(RankFailed(lacking.id, lacking.plain_fields)))
            return lacking.exit_code
        traceback.print_exc()
        channel.send(frame(RankFailed("rank_failed", {"rank": first.rank, "reason": one_line(failure)})))
        return WORKER
    return 0


class _Inbox:
    """Queue of the messages from rank 0, which may arrive while the rank waits for another socket."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._early: deque[ToRank | None] = deque()

    def receive(self) -> ToRank | None:
        """Return the next message; None if rank 0 is gone."""
        return self._early.popleft() if self._early else self._channel.receive_at_rank()

    def wait_for(self, sock: socket.socket) -> bool:
        """Wait until ``sock`` is readable; return False if the steps are abandoned or rank 0 is gone before that."""
        while not any(message is None or isinstance(message, Abandon) for message in self._early):
            readable, _, _ = select.select([sock, self._channel.socket], [], [])
            if sock in readable:
                return True
            self._early.append(self._channel.receive_at_rank())
        return False


class _Pulse(threading.Thread):
    """Sends heartbeats to rank 0 while it waits for this rank."""

    def __init__(self, channel: RankChannel, seconds: float) -> None:
        super().__init__(name="pulse", daemon=True)
        self.busy = threading.Event()
        self.busy.set()
        self._channel, self._seconds, self._frame = channel, seconds, frame(Alive())
        self._never = threading.Event()

    def run(self) -> None:
        try:
            while self.busy.wait():
                self._channel.send(self._frame)
                self._never.wait(self._seconds)
        except OSError:
            pass  # rank 0 is gone, which the main thread will detect


def _inherited(load: Load) -> Connections:
    """Return the connections over the inherited descriptors. Raises ``rank_late``."""
    from aiakq.runtime.distributed.rendezvous import Connections

    links = [None if link is None else socket.socket(fileno=link) for link in (load.link_in, load.link_out)]
    return Connections(_meet(load), *links)


def _follow(channel: RankChannel, load: Load, connect: Callable[[Load], Connections]) -> None:
    """Load the model, then execute messages until rank 0 closes the connection."""
    pulse = _Pulse(channel, min(1.0, load.time_limit / 8))
    pulse.start()
    if load.cpus:
        os.sched_setaffinity(0, load.cpus)
    import torch

    from aiakq.runtime.build.model_loader import load_model
    from aiakq.runtime.build.new_runner import new_runner
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.distributed.links import LinkReceiver, LinkSender
    from aiakq.runtime.distributed.model_share import ModelShare
    from aiakq.runtime.distributed.rank_group import checkpoint_digest
    from aiakq.runtime.executor.cpu_program import Bounds
    from aiakq.runtime.executor.follower import Follower, Stages
    from aiakq.runtime.executor.kv_cache import count_pages, fit_positions

    torch.set_num_threads(load.threads)
    connected = connect(load)
    collective = connected.collective
    config = fit_positions(EngineConfig.from_args(load.arguments))
    model, facts = load_model(config, ModelShare(collective, load.stage, load.num_stages))
    channel.send(frame(RankLoaded(version("aiakq"), checkpoint_digest(config), facts.get("tensor parallel", ""))))
    sizes = channel.receive_at_rank()
    if isinstance(sizes, CountPages):
        channel.send(frame(PagesCounted(count_pages(config, model, load.host_ranks))))
        sizes = channel.receive_at_rank()
    if sizes is None:
        return
    assert isinstance(sizes, Configure), "the next message says how large the cache is"
    runner = new_runner(config, model, sizes.num_pages, sizes.num_slots)
    runner.capture(Bounds(sizes.tokens, sizes.rows, sizes.length), config.compilation)
    inbox = _Inbox(channel)
    stages = Stages(samples=load.num_stages > 1 and load.rank == load.size * (load.num_stages - 1))
    if connected.link_out is not None:
        stages.link_out = LinkSender(connected.link_out)
    if connected.link_in is not None:
        link_in = connected.link_in
        stages.link_in, stages.wait = LinkReceiver(link_in), lambda: inbox.wait_for(link_in)
    max_pages = -(-sizes.length // config.cache.block_size)
    follower = Follower(runner, load.rank, collective, stages, sizes.num_slots, max_pages)
    freeze_objects()
    channel.send(frame(RankReady(runner.captured is not None)))
    pulse.busy.clear()
    while (request := inbox.receive()) is not None:
        pulse.busy.set()
        answer = follower.apply(request)
        if answer is not None:
            channel.send(frame(answer))
        if not follower.has_pending_steps:
            pulse.busy.clear()
        if collective is not None:
            _check(load, collective, channel)


def _check(load: Load, collective: RankCollective, channel: RankChannel) -> None:
    """Raise ``rank_late`` or ``rank_failed`` if a rank of this stage timed out or its connection was lost."""
    if collective.late_rank is not None:
        raise _late(load, collective, load.time_limit)
    # Rank 0 knows more about a rank that exited, and ends all ranks.
    if collective.lost_rank is not None and not select.select([channel.socket], [], [], _LOST_SECONDS)[0]:
        rank, reason = load.stage * load.size + collective.lost_rank, f"its connection to rank {load.rank} ended"
        raise error("rank_failed", rank=rank, reason=reason)


def _meet(load: Load) -> RankCollective | None:
    """Open and connect the collective of this rank's stage; None if the stage has one rank. Raises ``rank_late``."""
    import torch

    from aiakq.runtime.distributed.collectives import open_collective
    from aiakq.runtime.distributed.rank_group import START_SECONDS

    if load.gpu is not None:
        torch.cuda.set_device(load.gpu)
    if load.memory is None:
        return None
    device = torch.device("cpu" if load.gpu is None else "cuda")
    collective = open_collective(load.transport, load.memory, load.stage_rank, load.size, load.time_limit, device)
    os.close(load.memory)
    collective.connect(START_SECONDS)
    if collective.late_rank is not None:
        raise _late(load, collective, START_SECONDS)
    return collective


def _late(load: Load, collective: RankCollective, limit: float) -> AiakqError:
    """Return the error for a rank of this stage that timed out."""
    assert collective.late_rank is not None
    rank = load.stage * load.size + collective.late_rank
    return error("rank_late", rank=rank, limit=limit, operation=collective.operation)
