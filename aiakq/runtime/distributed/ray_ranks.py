"""Ranks that Ray places, possibly on several nodes.

Ray starts their processes and detects lost nodes; the ranks communicate over their own connections.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from aiakq.errors import AiakqError, error
from aiakq.kernels.cpu import library
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.links import LinkSender
from aiakq.runtime.distributed.messages import FromRank, Listening, Load, RankChannel
from aiakq.runtime.distributed.rank_group import Rank, RankGroup
from aiakq.runtime.distributed.ray_cluster import Placement
from aiakq.runtime.distributed.ray_processes import START_SECONDS, RayProcesses
from aiakq.runtime.distributed.rendezvous import Rendezvous

_CODE = "from aiakq.runtime.build.remote_rank import main; main()"


def start_ray_ranks(config: EngineConfig) -> RankGroup:
    """Start ranks 1 and up, which then load the model; this process is rank 0.

    Until the group is closed, this process uses a rank's share of the threads.

    Raises ``ray_missing``, ``ray_unavailable``, ``ray_resources``, ``ranks_unavailable`` and the errors of ranks.
    """
    reason = library.unavailable()
    if reason is not None:
        raise error("ranks_unavailable", reason=reason)
    parallel = config.parallel
    processes = RayProcesses(parallel.world_size, parallel.tensor_parallel_size, _CODE)
    try:
        return _group(config, processes)
    except BaseException:
        processes.close()
        raise


def _group(config: EngineConfig, processes: RayProcesses) -> RankGroup:
    """Start the ranks, connect them to each other, and return them as a group."""
    processes.start()
    size, limit = config.parallel.tensor_parallel_size, config.parallel.timeout
    channels = {rank: RankChannel(sock, FromRank) for rank, sock in sorted(processes.sockets.items())}
    own_address = processes.listener.address
    assert isinstance(own_address, tuple)
    addresses = [own_address, *(_address(rank, channel) for rank, channel in channels.items())]
    _load(config, processes.placement, channels, addresses)
    try:
        connections = Rendezvous(0, size, addresses, processes.listener, processes.secret).connect(limit)
    except AiakqError:
        for channel in channels.values():  # a rank may have reported a more specific error
            with contextlib.suppress(TimeoutError):
                channel.receive(0)
        raise
    processes.listener.close()
    ranks = [Rank(rank, processes.process(rank), channel) for rank, channel in channels.items()]
    threads = processes.use_threads()
    link = None if connections.link_out is None else LinkSender(connections.link_out)
    collectives = [] if connections.collective is None else [connections.collective]
    host_ranks = processes.placement.ranks_on(processes.placement.slots[0].host)
    return RankGroup(ranks, size, threads, limit, collectives, link, processes.close, host_ranks)


def _load(
    config: EngineConfig, placement: Placement, channels: dict[int, RankChannel], addresses: list[tuple[str, int]]
) -> None:
    """Have the other ranks load the model, with rank 0's device and dtype."""
    parallel = config.parallel
    arguments = replace(parallel.arguments, device="cpu", dtype=config.device.dtype_name)
    for rank, channel in channels.items():
        slot = placement.slots[rank]
        load = Load(
            arguments=arguments,
            rank=rank,
            size=parallel.tensor_parallel_size,
            num_stages=parallel.pipeline_parallel_size,
            host_ranks=placement.ranks_on(slot.host),
            transport="memory",
            threads=slot.threads,
            time_limit=parallel.timeout,
            addresses=addresses,
        )
        channel.send(load)


def _address(rank: int, channel: RankChannel) -> tuple[str, int]:
    """Receive the address that a rank listens at."""
    try:
        message = channel.receive(START_SECONDS)
    except TimeoutError:
        raise error("rank_late", rank=rank, limit=START_SECONDS, operation="starting its process") from None
    if not isinstance(message, Listening):
        raise error("rank_failed", rank=rank, reason="it exited before it began to load")
    return message.host, message.port
