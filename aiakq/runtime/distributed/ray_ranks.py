"""Ranks that Ray places, possibly on several nodes.

Ray starts their processes and detects lost nodes; the ranks communicate over their own connections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import torch

from aiakq.errors import AiakqError, error
from aiakq.kernels.cpu import library
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.links import LinkSender
from aiakq.runtime.distributed.messages import FromRank, Listening, Load, RankChannel
from aiakq.runtime.distributed.rank_group import Rank, RankGroup
from aiakq.runtime.distributed.ray_cluster import Placement, Session
from aiakq.runtime.distributed.ray_processes import START_SECONDS, RayProcesses
from aiakq.runtime.distributed.rendezvous import Connections, Rendezvous
from aiakq.system.threads import RestoreThreads

_CODE = "from aiakq.runtime.build.remote_rank import main; main()"


def start_ray_ranks(config: EngineConfig) -> RankGroup:
    """Start ranks 1 and up, which then load the model; this process is rank 0.

    Until the group is closed, this process uses a rank's share of the threads.

    Raises ``ray_missing``, ``ray_unavailable``, ``ray_resources``, ``ranks_unavailable`` and the errors of ranks.
    """
    reason = library.unavailable()
    if reason is not None:
        raise error("ranks_unavailable", reason=reason)
    started = _Started(Session())
    try:
        return started.group(config)
    except BaseException:
        started.close()
        raise


class _Started:
    """The resources of a group that is being started, released by ``close``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._restore: Callable[[], None] = RestoreThreads(torch.get_num_threads(), torch.set_num_threads)
        self._placement: Placement | None = None
        self._processes: RayProcesses | None = None
        self._channels: dict[int, RankChannel] = {}

    def group(self, config: EngineConfig) -> RankGroup:
        """Start the ranks, connect them to each other, and return them as a group."""
        parallel = config.parallel
        count, size = parallel.world_size, parallel.tensor_parallel_size
        self._placement = placement = Placement(self._session, count, size)
        slots = placement.slots
        self._processes = processes = RayProcesses(self._session, placement, _CODE)
        processes.start()
        self._channels = {rank: RankChannel(sock, FromRank) for rank, sock in sorted(processes.sockets.items())}
        own_address = processes.listener.address
        assert isinstance(own_address, tuple)
        addresses = [own_address, *(self._address(rank) for rank in range(1, count))]
        self._load(config, placement, addresses)
        rendezvous = Rendezvous(0, size, addresses, processes.listener, processes.secret)
        connections = self._rendezvous(rendezvous, parallel.timeout)
        processes.listener.close()
        ranks = [Rank(rank, processes.process(rank), channel) for rank, channel in self._channels.items()]
        threads = min(slots[0].threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        link = None if connections.link_out is None else LinkSender(connections.link_out)
        collectives = [] if connections.collective is None else [connections.collective]
        host_ranks = placement.ranks_on(slots[0].host)
        return RankGroup(ranks, size, threads, parallel.timeout, collectives, link, self.close, host_ranks)

    def close(self) -> None:
        """End all processes that Ray has started, and release the placement group."""
        self._restore()
        if self._processes is not None:
            self._processes.close()
        if self._placement is not None:
            self._placement.close()

    def _load(self, config: EngineConfig, placement: Placement, addresses: list[tuple[str, int]]) -> None:
        """Have the other ranks load the model, with rank 0's device and dtype."""
        parallel = config.parallel
        arguments = replace(parallel.arguments, device="cpu", dtype=config.device.dtype_name)
        for rank, channel in self._channels.items():
            slot = placement.slots[rank]
            load = Load(
                arguments=arguments,
                rank=rank,
                size=parallel.tensor_parallel_size,
                num_stages=parallel.pipeline_parallel_size,
                host_ranks=placement.ranks_on(slot.host),
                transport="memory",
                memory=None,
                gpu=None,
                link_in=None,
                link_out=None,
                threads=slot.threads,
                cpus=[],
                time_limit=parallel.timeout,
                addresses=addresses,
            )
            channel.send(load)

    def _address(self, rank: int) -> tuple[str, int]:
        """Receive the address that a rank listens at."""
        try:
            message = self._channels[rank].receive(START_SECONDS)
        except TimeoutError:
            raise error("rank_late", rank=rank, limit=START_SECONDS, operation="starting its process") from None
        if not isinstance(message, Listening):
            raise error("rank_failed", rank=rank, reason="it exited before it began to load")
        return message.host, message.port

    def _rendezvous(self, rendezvous: Rendezvous, time_limit: float) -> Connections:
        try:
            return rendezvous.connect(time_limit)
        except AiakqError:
            for channel in self._channels.values():  # a rank may have reported a more specific error
                with contextlib.suppress(TimeoutError):
                    channel.receive(0)
            raise
