"""Ranks as child processes of rank 0, which inherit shared memory and sockets from it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

import torch

from aiakq.errors import error
from aiakq.runtime.config.parallel import ParallelConfig
from aiakq.runtime.distributed.collectives import RankCollective, descriptor_bytes, open_collective, unavailable
from aiakq.runtime.distributed.links import LinkSender
from aiakq.runtime.distributed.messages import FromRank, Load, RankChannel
from aiakq.runtime.distributed.rank_group import Rank, RankGroup
from aiakq.system.channel import Disconnected
from aiakq.system.child import Child, child_command
from aiakq.system.threads import RestoreThreads
from aiakq.system.topology import cpu_shares

_CODE = "from aiakq.runtime.build.rank_process import main; main()"


def start_child_ranks(parallel: ParallelConfig, transport: str, gpus: Sequence[int] = ()) -> RankGroup:
    """Start ranks 1 and up, which then load the model; this process is rank 0.

    Until the group is closed, this process uses a rank's share of the threads. On a CPU, the calling thread is also
    pinned to a rank's share of the processors.

    transport  transport of the collectives of a stage; see collectives.py.
    gpus       index of each rank's GPU; empty if the ranks compute on the CPU.

    Raises ``ranks_unavailable``, ``rank_failed`` and ``rank_late``.
    """
    device = torch.device("cuda" if gpus else "cpu")
    reason = unavailable(transport, device.type)
    if reason is not None or not hasattr(os, "memfd_create"):
        raise error(
            "ranks_unavailable", reason=reason or "they share memory through memfd_create, which only Linux has"
        )
    size, count = parallel.tensor_parallel_size, parallel.world_size
    cpus, threads = [[]] * count if gpus else cpu_shares(count), max(1, torch.get_num_threads() // count)
    restore = RestoreThreads(torch.get_num_threads(), torch.set_num_threads)
    ranks: list[Rank] = []
    with _Connections(size, count // size, parallel.timeout, transport, device) as connections:
        try:
            for rank in range(1, count):
                link_in, link_out = connections.links(rank)
                load = Load(
                    arguments=parallel.arguments,
                    rank=rank,
                    size=size,
                    num_stages=count // size,
                    host_ranks=1 if gpus else count,
                    transport=transport,
                    memory=connections.memory(rank),
                    gpu=gpus[rank] if gpus else None,
                    link_in=link_in,
                    link_out=link_out,
                    threads=threads,
                    cpus=cpus[rank],
                    time_limit=parallel.timeout,
                )
                ranks.append(_start(load))
        except BaseException:
            for started in ranks:
                started.process.kill()
                started.process.end()
            raise
        sock = connections.own_link()
        link = None if sock is None else LinkSender(sock)
        group = RankGroup(ranks, size, threads, parallel.timeout, connections.collectives, link, restore)
    group.host_ranks = 1 if gpus else count
    group.connect()
    torch.set_num_threads(threads)
    if cpus[0]:
        os.sched_setaffinity(0, cpus[0])
    return group


class _Connections:
    """Shared memory of the ranks of each stage, and sockets from each rank to its counterpart in the next stage.

    The descriptors are closed at the end of the with-block, after the child processes have inherited them.
    """

    def __init__(self, size: int, num_stages: int, time_limit: float, transport: str, device: torch.device) -> None:
        self._size = size
        self._memories: list[int] = []
        self.collectives: list[RankCollective] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        for stage in range(num_stages if size > 1 else 0):
            memory = os.memfd_create("aiakq-ranks")
            self._memories.append(memory)
            os.ftruncate(memory, descriptor_bytes(transport, size))
            # Only shared memory can be interrupted from outside; torch's ranks wait for each other alone.
            if stage == 0 or transport == "memory":
                self.collectives.append(open_collective(transport, memory, 0, size, time_limit, device))
        for _ in range(size * (num_stages - 1)):
            self._pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))

    def memory(self, rank: int) -> int | None:
        """Return the descriptor of the memory that ``rank`` shares with its stage, or None."""
        return self._memories[rank // self._size] if self._memories else None

    def links(self, rank: int) -> tuple[int | None, int | None]:
        """Return the descriptors of ``rank``'s sockets from the previous stage and to the next one, or None."""
        previous, following = rank - self._size, rank
        link_in = self._pairs[previous][1].fileno() if previous >= 0 else None
        return link_in, self._pairs[following][0].fileno() if following < len(self._pairs) else None

    def own_link(self) -> socket.socket | None:
        """Return rank 0's socket to the next stage, or None."""
        return self._pairs[0][0].dup() if self._pairs else None

    def __enter__(self) -> _Connections:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for memory in self._memories:
            os.close(memory)
        for pair in self._pairs:
            for end in pair:
                end.close()


def _start(load: Load) -> Rank:
    """Start a rank in a child process. Raises ``rank_failed``."""
    inherited = [number for number in (load.memory, load.link_in, load.link_out) if number is not None]
    try:
        process = Child(child_command(_CODE), threads=load.threads, pass_fds=inherited)
    except OSError as failure:
        raise error("rank_failed", rank=load.rank, reason=f"it could not be started: {failure}") from None
    channel = RankChannel(process.sockets[0], FromRank)
    with contextlib.suppress(Disconnected):  # the group tells why
        channel.send(load)
    return Rank(load.rank, process, channel)
