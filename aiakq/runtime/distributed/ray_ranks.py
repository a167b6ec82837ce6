"""Ranks that Ray places, possibly on several nodes. Ray starts their processes and notices lost nodes; what ranks send
each other goes over connections of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from aiakq.arguments.environment import SETTINGS
from aiakq.errors import AiakqError, error
from aiakq.kernels.cpu import library
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.connections import CONTROL, Address, Listener, new_secret
from aiakq.runtime.distributed.links import LinkSender
from aiakq.runtime.distributed.meeting import Connections, Meeting
from aiakq.runtime.distributed.messages import Channel, Listening, Load, RankFailed, frame
from aiakq.runtime.distributed.rank_group import RankGroup
from aiakq.runtime.distributed.ray_actor import RankActor
from aiakq.runtime.distributed.ray_cluster import Placement, Session
from aiakq.system.frames import limit_sending
from aiakq.system.threads import RestoreThreads

logger = logging.getLogger("aiakq.runtime")

#: Seconds for Ray to start the processes of all ranks.
START_SECONDS = 180.0
#: And for each, once it runs, to reach this one.
CONNECT_SECONDS = 20.0
#: Seconds for Ray to say why a rank has ended; its connection has told that it has.
_REASON_SECONDS = 1.5
_LOOPBACK = "127.0.0.1"
#: Variables of rank 0 that ranks get where they are not set: what computes, and where models come from. Addresses,
#: interfaces, paths and secrets are those of each node.
SHARED_VARIABLES = (
    *sorted(SETTINGS.keys() & {"AIAKQ_KERNELS", "AIAKQ_CPU_ISA", "AIAKQ_DEBUG"}),
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)


def start_ray_ranks(config: EngineConfig) -> RankGroup:
    """Ranks 1 and up, loading; this process is rank 0. Until the group is closed, it has a rank's threads.

    Raises ``ray_missing``, ``ray_unavailable``, ``ray_resources``, ``ranks_unavailable`` and what ranks raise.
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
    """What has been started so far, and what ends it."""

    def __init__(self, session: Session) -> None:
        self._session, self._ray = session, session.ray
        self._restore: Callable[[], None] = RestoreThreads(torch.get_num_threads(), torch.set_num_threads)
        self._placement: Placement | None = None
        self._actors: list[Any] = []
        self._channels: dict[int, Channel] = {}

    def group(self, config: EngineConfig) -> RankGroup:
        """The ranks, having met."""
        parallel = config.parallel
        count, size = parallel.world_size, parallel.tensor_parallel_size
        self._placement = placement = Placement(self._session, count, size)
        slots, secret = placement.slots, new_secret()
        is_local = all(slot.host == slots[0].host for slot in slots)
        listener = Listener(_LOOPBACK if is_local else slots[0].host, secret)
        try:
            refs = self._start(placement, listener.address, secret, _LOOPBACK if is_local else "")
            self._accept(listener, refs, count)
            assert isinstance(listener.address, tuple)
            addresses = [listener.address, *(self._address(rank) for rank in range(1, count))]
            self._load(config, placement, addresses)
            connections = self._meet(Meeting(0, size, addresses, listener, secret), parallel.timeout)
        finally:
            listener.close()
        ranks = []
        for rank, channel in sorted(self._channels.items()):
            actor = self._actors[rank - 1]
            ranks.append(RayRank(self._session, rank, actor, channel, slots[rank].host, parallel.timeout))
        threads = min(slots[0].threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        link = None if connections.link_out is None else LinkSender(connections.link_out)
        collectives = [] if connections.collective is None else [connections.collective]
        host_ranks = placement.ranks_on(slots[0].host)
        return RankGroup(ranks, size, threads, parallel.timeout, collectives, link, self.close, host_ranks)

    def close(self) -> None:
        """End everything that Ray has started, and give back what was reserved."""
        self._restore()
        for channel in self._channels.values():
            channel.socket.close()
        if not self._session.is_current:
            return
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        if self._placement is not None:
            self._placement.close()

    def _start(self, placement: Placement, address: Address, secret: bytes, host: str) -> dict[int, Any]:
        """Have Ray start the other ranks, which connect to ``address``; rank -> what its start returns."""
        environment = {name: os.environ[name] for name in SHARED_VARIABLES if name in os.environ}
        remote, refs = self._ray.remote(RankActor), {}
        for rank, slot in list(enumerate(placement.slots))[1:]:
            options = {"num_cpus": slot.threads, "max_restarts": 0, "scheduling_strategy": placement.strategy(slot)}
            actor = remote.options(**options).remote(rank)
            self._actors.append(actor)
            refs[rank] = actor.start.remote(address, CONNECT_SECONDS, secret, host, environment, slot.threads)
        return refs

    def _load(self, config: EngineConfig, placement: Placement, addresses: list[tuple[str, int]]) -> None:
        """Have the other ranks load. What rank 0 has found out about its device holds for all."""
        parallel = config.parallel
        dtype = str(config.device.dtype).removeprefix("torch.")
        for rank, channel in self._channels.items():
            slot = placement.slots[rank]
            load = Load(
                arguments={**parallel.arguments, "device": "cpu", "dtype": dtype},
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
            channel.send(frame(load))

    def _accept(self, listener: Listener, refs: dict[int, Any], count: int) -> None:
        """Wait for the connections of all ranks."""
        deadline = time.monotonic() + START_SECONDS
        while len(self._channels) < count - 1:
            try:
                peer, sock = listener.accept(0.5)
            except TimeoutError:
                self._check_start(refs)
                if time.monotonic() > deadline:
                    rank = min(set(range(1, count)) - self._channels.keys())
                    place = "its connection to rank 0"
                    raise error("rank_late", rank=rank, limit=START_SECONDS, place=place) from None
                continue
            if peer.purpose != CONTROL or not 0 < peer.rank < count:
                sock.close()
                continue
            if peer.rank in self._channels:  # it did not get the answer, and has come again
                self._channels[peer.rank].socket.close()
            self._channels[peer.rank] = Channel(sock)

    def _check_start(self, refs: dict[int, Any]) -> None:
        for rank, ref in refs.items():
            if not self._ray.wait([ref], timeout=0)[0]:
                continue
            try:
                failure = self._ray.get(ref)
            except Exception as problem:
                raise error("rank_failed", rank=rank, reason=_first_line(problem)) from problem
            if failure is not None:
                raise error(failure[0], **failure[1])

    def _address(self, rank: int) -> tuple[str, int]:
        """Where a rank listens for others."""
        channel = self._channels[rank]
        readable, _, _ = select.select([channel.socket], [], [], START_SECONDS)
        if not readable:
            raise error("rank_late", rank=rank, limit=START_SECONDS, place="the end of its start")
        message = channel.receive_from_rank()
        if isinstance(message, RankFailed):
            raise error(message.id, **message.fields)
        if not isinstance(message, Listening):
            raise error("rank_failed", rank=rank, reason="it ended before it had begun to load")
        return message.host, message.port

    def _meet(self, meeting: Meeting, time_limit: float) -> Connections:
        try:
            return meeting.hold_meeting(time_limit)
        except AiakqError:
            for channel in self._channels.values():  # one of them may know more
                if select.select([channel.socket], [], [], 0)[0]:
                    message = channel.receive_from_rank()
                    if isinstance(message, RankFailed):
                        raise error(message.id, **message.fields) from None
            raise


class RayRank:
    """One rank that Ray has started; see Rank."""

    def __init__(
        self, session: Session, number: int, actor: Any, channel: Channel, host: str, time_limit: float
    ) -> None:
        self.number, self.channel, self.actor = number, channel, actor
        self._session, self._ray, self._host = session, session.ray, host
        self._reason: str | None = None
        limit_sending(channel.socket, time_limit)
        #: Process ids of the actor and of the rank, on its node.
        self.pids: tuple[int, int] = self._ray.get(actor.pids.remote())
        logger.debug("rank %d: process %d of node %s", number, self.pids[1], host)
        self._ended = actor.wait.remote()
        self._watch = threading.Thread(target=self._wait, name=f"ray-rank-{number}", daemon=True)
        self._watch.start()

    def _wait(self) -> None:
        """Ray may notice the end of a node before its silence is noticed."""
        try:
            self._reason = f"{self._ray.get(self._ended)} on node {self._host}"
        except Exception as failure:
            self._reason = f"Ray has lost it on node {self._host}: {_first_line(failure)}"
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """See Rank."""
        if self._session.is_current:
            with contextlib.suppress(Exception):
                self._ray.kill(self.actor)

    def end(self) -> None:
        """See Rank."""
        self._watch.join(2.0)
        self.kill()

    def exit_reason(self) -> str:
        """See Rank."""
        self._watch.join(_REASON_SECONDS)
        return self._reason or f"its connection from node {self._host} ended"


def _first_line(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines() or [type(failure).__name__]
    return lines[-1 if "Traceback" in lines[0] else 0].strip().rstrip(".")
