"""Gathering of activations between ranks on several machines, over sockets."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import socket
from collections.abc import Mapping
from typing import NamedTuple

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.gather import NativeCollective, memory_bytes


class Stream(NamedTuple):
    """Two connections to another rank: one for columns, one for the notice that they are no longer awaited."""

    data: socket.socket
    alarm: socket.socket


class SocketCollective(NativeCollective):
    """Collective operations of one rank in a group without shared memory.

    streams     connected sockets to each of the other ranks; the group takes ownership.
    time_limit  seconds without a byte from or to another rank before this one gives up the group.
    """

    def __init__(self, streams: Mapping[int, Stream], rank: int, size: int, time_limit: float) -> None:
        super().__init__(mmap.mmap(-1, memory_bytes(size)), rank, size, time_limit)
        native = library.load_library()
        if size > native.constants["MAX_STREAMS"] or set(streams) != set(range(size)) - {rank}:
            raise ValueError(f"streams to {sorted(streams)} of rank {rank} of {size}")
        self._streams = dict(streams)
        count = native.constants["STREAM_BYTES"]
        self._states = ctypes.create_string_buffer(count * size)
        self._table = (native.structs["RankStream"] * size)()
        for other in range(size):
            entry = self._table[other]
            entry.state = ctypes.addressof(self._states) + other * count
            entry.data = entry.alarm = -1
        for other, stream in self._streams.items():
            entry = self._table[other]
            entry.data, entry.alarm = stream.data.fileno(), stream.alarm.fileno()
        self._group.streams = ctypes.addressof(self._table)

    def give_up(self) -> None:
        """See NativeCollective. Closes the connections."""
        super().give_up()
        for stream in self._streams.values():
            for sock in stream:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def interrupt(self) -> None:
        """See NativeCollective."""
        if self.is_given_up:
            return
        super().interrupt()
        for stream in self._streams.values():
            with contextlib.suppress(OSError):  # a lost connection is reported elsewhere
                stream.alarm.send(bytes([self._group.epoch % 256]), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def start_over(self) -> None:
        """See NativeCollective. Receivers skip data that was sent before."""
        self._group.num_barriers = 0
        self._group.epoch += 1
        if self._reason.value == self._interrupted:
            self._reason.value = 0
