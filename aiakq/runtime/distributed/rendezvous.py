"""Rendezvous of ranks that were started independently: each connects to the peers it needs that have lower ranks.

The ranks of a stage share memory if all of them are on one machine; otherwise their collectives use sockets.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from aiakq.errors import error
from aiakq.kernels.cpu.gather import NativeCollective, memory_bytes
from aiakq.kernels.cpu.gather_sockets import SocketCollective, Stream
from aiakq.runtime.distributed.collectives import RankCollective
from aiakq.runtime.distributed.connections import ALARM, DATA, LINK, MEMORY, Listener, Peer, connect, connect_once

#: Time limit of the rendezvous in seconds, once the addresses of all ranks are known.
RENDEZVOUS_SECONDS = 30.0
#: Length of the name of the socket over which the descriptor of shared memory is passed.
_NAME_BYTES = 39


@dataclass(frozen=True)
class Connections:
    """A rank's connections to other ranks, besides the control connection to rank 0.

    collective  collective of its stage; None if the stage has one rank.
    link_in     socket from the previous stage; None in the first stage.
    link_out    socket to the next stage; None in the last stage.
    """

    collective: RankCollective | None
    link_in: socket.socket | None
    link_out: socket.socket | None


class Rendezvous:
    """The rendezvous as one rank takes part in it.

    addresses  addresses of the listeners of all ranks; ``listener`` is this rank's.
    """

    def __init__(self, rank: int, size: int, addresses: Sequence[tuple[str, int]], listener: Listener, secret: bytes):
        self._rank, self._size, self._secret = rank, size, secret
        self._addresses, self._listener = addresses, listener
        self._sockets: dict[Peer, socket.socket] = {}

    def connect(self, time_limit: float) -> Connections:
        """Connect to the peers of this rank; all ranks call this at the same time.

        time_limit  time limit of a step in seconds, for the collective; also that of a connection if it is longer than
                    RENDEZVOUS_SECONDS.

        Raises ``rank_unreachable``, ``rank_late`` and ``rank_failed``.
        """
        try:
            self._connect_peers(max(RENDEZVOUS_SECONDS, time_limit))
            collective = self._collective(time_limit) if self._size > 1 else None
        except BaseException:
            for sock in self._sockets.values():
                sock.close()
            raise
        previous, following = Peer(self._rank - self._size, LINK), Peer(self._rank + self._size, LINK)
        return Connections(collective, self._sockets.get(previous), self._sockets.get(following))

    def _connect_peers(self, limit: float) -> None:
        first = self._rank // self._size * self._size
        stage = [rank for rank in range(first, first + self._size) if rank != self._rank]
        wanted = [Peer(rank, purpose) for rank in stage for purpose in (DATA, ALARM)]
        wanted += [Peer(self._rank - self._size, LINK), Peer(self._rank + self._size, LINK)]
        for rank, purpose in wanted:
            if 0 <= rank < self._rank:
                this_peer = Peer(self._rank, purpose)
                sock = connect(self._addresses[rank], self._secret, this_peer, rank, limit)
                self._sockets[Peer(rank, purpose)] = sock
        missing = {peer for peer in wanted if self._rank < peer.rank < len(self._addresses)}
        while missing:
            try:
                peer, sock = self._listener.accept(limit)
            except TimeoutError:
                operation = f"connecting to rank {self._rank}"
                raise error("rank_late", rank=min(missing).rank, limit=limit, operation=operation) from None
            if peer.rank <= self._rank or peer not in wanted:
                sock.close()
                continue
            if peer in self._sockets:  # it did not receive the reply, and has reconnected
                self._sockets[peer].close()
            self._sockets[peer] = sock
            missing.discard(peer)

    def _collective(self, time_limit: float) -> NativeCollective:
        stage_rank, first = self._rank % self._size, self._rank // self._size * self._size
        streams = {
            rank - first: Stream(self._sockets[rank, DATA], self._sockets[rank, ALARM])  # type: ignore[index]
            for rank in range(first, first + self._size)
            if rank != self._rank
        }
        try:
            for stream in streams.values():
                stream.data.settimeout(RENDEZVOUS_SECONDS)
            if stage_rank:
                memory = take_memory(streams[0].data, self._size, self._secret, self._rank)
            else:
                memory = offer_memory([stream.data for stream in streams.values()], self._size, self._secret)
            for stream in streams.values():
                stream.data.settimeout(None)
        except OSError as failure:
            reason = f"the ranks of its stage did not agree on a transport for collectives: {failure}"
            raise error("rank_failed", rank=self._rank, reason=reason) from failure
        if memory is None:
            return SocketCollective(streams, stage_rank, self._size, time_limit)
        for stream in streams.values():
            stream.data.close()
            stream.alarm.close()
        return NativeCollective(memory, stage_rank, self._size, time_limit)


def offer_memory(others: Sequence[socket.socket], size: int, secret: bytes) -> mmap.mmap | None:
    """Allocate memory and share it with the other ranks of a stage; return None if one of them is on another machine.

    others  sockets to the other ranks of the stage.

    Each connection carries the name of a local socket, then a byte from the rank that says whether it received the
    descriptor through that socket, then a byte back that says whether all ranks did. Raises OSError.
    """
    if not hasattr(os, "memfd_create"):
        for other in others:
            other.sendall(bytes(_NAME_BYTES))
        _agree(others)
        return None
    memory, listener = os.memfd_create("aiakq-ranks"), Listener("", secret)
    done = threading.Event()
    helper = threading.Thread(target=_hand_out, args=(listener, memory, done), name="memory", daemon=True)
    try:
        os.ftruncate(memory, memory_bytes(size))
        assert isinstance(listener.address, str)
        helper.start()
        for other in others:
            other.sendall(listener.address.encode().ljust(_NAME_BYTES, b"\0"))
        shared = _agree(others)
        return mmap.mmap(memory, memory_bytes(size)) if shared else None
    finally:
        done.set()
        if helper.ident is not None:
            helper.join()
        listener.close()
        os.close(memory)


def take_memory(first: socket.socket, size: int, secret: bytes, rank: int) -> mmap.mmap | None:
    """Receive the memory that ``offer_memory`` shares; return None if a rank is on another machine. Raises OSError."""
    name = _receive(first, _NAME_BYTES).rstrip(b"\0")
    memory = None
    if name:
        with contextlib.suppress(OSError, ValueError):  # rank 0 of the stage is on another machine
            memory = _receive_memory("\0" + name.lstrip(b"\0").decode(), size, secret, rank)
    first.sendall(bytes([memory is not None]))
    return memory if _receive(first, 1) == b"\1" else None


def _agree(others: Sequence[socket.socket]) -> bool:
    replies = [_receive(other, 1) for other in others]
    shared = all(reply == b"\1" for reply in replies)
    for other in others:
        other.sendall(bytes([shared]))
    return shared


def _hand_out(listener: Listener, memory: int, done: threading.Event) -> None:
    while not done.is_set():
        with contextlib.suppress(OSError):  # including TimeoutError
            _, sock = listener.accept(0.1)
            with sock:
                socket.send_fds(sock, [b"\1"], [memory])


def _receive_memory(name: str, size: int, secret: bytes, rank: int) -> mmap.mmap:
    with connect_once(name, secret, Peer(rank, MEMORY), RENDEZVOUS_SECONDS) as sock:
        sock.settimeout(RENDEZVOUS_SECONDS)
        _, files, _, _ = socket.recv_fds(sock, 1, 1)
    if not files:
        raise OSError("no descriptor was received")
    try:
        return mmap.mmap(files[0], memory_bytes(size))
    finally:
        os.close(files[0])


def _receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("a rank closed its connection")
        data += piece
    return data
