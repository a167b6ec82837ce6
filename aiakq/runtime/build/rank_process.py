"""The process of a rank other than 0: loads its share of the model, and executes rank 0's messages.

It is started by ``child_ranks`` with the descriptor of an inherited socket as its only argument. It ignores signals and
exits when rank 0 closes the socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

from aiakq.errors import AiakqError, error
from aiakq.runtime.distributed.messages import (
    Abandon,
    Configure,
    CountPages,
    FollowerChannel,
    Load,
    PagesCounted,
    RankLoaded,
    RankReady,
    ToRank,
)
from aiakq.system.child import begin_child, exit_child, parent_socket, run_for_parent
from aiakq.system.memory import freeze_objects

if TYPE_CHECKING:
    from aiakq.runtime.distributed.collectives import RankCollective
    from aiakq.runtime.distributed.rendezvous import Connections

#: Seconds to leave to rank 0 for detecting that another rank was lost.
_LOST_SECONDS = 5.0


def main() -> None:
    """Entry point of the child process; never returns."""
    begin_child()
    exit_child(run_rank(FollowerChannel(parent_socket(), ToRank), _inherited))


def run_rank(channel: FollowerChannel, connect: Callable[[Load], Connections]) -> int:
    """Load the model and execute messages; return the exit code.

    connect  returns the connections to the other ranks.
    """

    def work(load: Load) -> None:
        channel.send_heartbeats(min(1.0, load.time_limit / 8))
        with contextlib.suppress(ConnectionError, TimeoutError):  # another rank is gone: rank 0 knows which
            _follow(channel, load, connect)

    return run_for_parent(channel, Load, work, lambda load, reason: error("rank_failed", rank=load.rank, reason=reason))


class _Inbox:
    """Queue of the messages from rank 0, which may arrive while the rank waits for another socket."""

    def __init__(self, channel: FollowerChannel) -> None:
        self._channel = channel
        self._early: deque[ToRank | None] = deque()

    def receive(self) -> ToRank | None:
        """Return the next message; None if rank 0 is gone."""
        return self._early.popleft() if self._early else self._channel.receive()

    def wait_for(self, sock: socket.socket) -> bool:
        """Wait until ``sock`` is readable; return False if the steps are abandoned or rank 0 is gone before that."""
        while not any(message is None or isinstance(message, Abandon) for message in self._early):
            readable, _, _ = select.select([sock, self._channel.socket], [], [])
            if sock in readable:
                return True
            self._early.append(self._channel.receive())
        return False


def _inherited(load: Load) -> Connections:
    """Return the connections over the inherited descriptors. Raises ``rank_late``."""
    from aiakq.runtime.distributed.rendezvous import Connections

    links = [None if link is None else socket.socket(fileno=link) for link in (load.link_in, load.link_out)]
    return Connections(_meet(load), *links)


def _follow(channel: FollowerChannel, load: Load, connect: Callable[[Load], Connections]) -> None:
    """Load the model, then execute messages until rank 0 closes the connection."""
    if load.cpus:
        os.sched_setaffinity(0, load.cpus)
    import torch

    from aiakq.runtime.build.model_loader import load_model
    from aiakq.runtime.build.new_runner import fitting_pages, new_target_runner
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.distributed.links import LinkReceiver, LinkSender
    from aiakq.runtime.distributed.model_share import ModelShare
    from aiakq.runtime.distributed.rank_group import checkpoint_digest
    from aiakq.runtime.executor.cpu_program import Bounds
    from aiakq.runtime.executor.follower import Follower, Stages
    from aiakq.runtime.executor.kv_cache import fit_positions

    torch.set_num_threads(load.threads)
    connected = connect(load)
    collective = connected.collective
    config = fit_positions(EngineConfig.from_args(load.arguments))
    model, facts = load_model(config, ModelShare(collective, load.stage, load.num_stages))
    channel.send(RankLoaded(version("aiakq"), checkpoint_digest(config), facts.get("tensor parallel", "")))
    sizes = channel.receive()
    if isinstance(sizes, CountPages):
        channel.send(PagesCounted(fitting_pages(config, model, host_ranks=load.host_ranks)))
        sizes = channel.receive()
    if sizes is None:
        return
    assert isinstance(sizes, Configure), "the next message says how large the cache is"
    stages = Stages(samples=load.num_stages > 1 and load.rank == load.size * (load.num_stages - 1))
    runner = new_target_runner(config, model, sizes.num_pages, sizes.num_slots, stages.samples)
    runner.capture(Bounds(sizes.tokens, sizes.rows, sizes.length), config.compilation)
    inbox = _Inbox(channel)
    if connected.link_out is not None:
        stages.link_out = LinkSender(connected.link_out)
    if connected.link_in is not None:
        link_in = connected.link_in
        stages.link_in, stages.wait = LinkReceiver(link_in), lambda: inbox.wait_for(link_in)
    max_pages = -(-sizes.length // config.cache.block_size)
    follower = Follower(runner, load.rank, collective, stages, sizes.num_slots, max_pages)
    freeze_objects()
    channel.send(RankReady(runner.captured is not None))
    channel.busy.clear()
    while (request := inbox.receive()) is not None:
        channel.busy.set()
        answer = follower.apply(request)
        if answer is not None:
            channel.send(answer)
        if not follower.has_pending_steps:
            channel.busy.clear()
        if collective is not None:
            _check(load, collective, channel)


def _check(load: Load, collective: RankCollective, channel: FollowerChannel) -> None:
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
