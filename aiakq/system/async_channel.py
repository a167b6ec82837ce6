"""AsyncChannel: the end of a channel (channel.py) on an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic

from aiakq.system.channel import Codec, Failure, Heartbeat, Receive, Send, split

#: Size in bytes above which a frame takes milliseconds to decode, for example with prompt log-probabilities.
_LARGE_FRAME = 256 << 10


class AsyncChannel(Generic[Send, Receive]):
    """One end of a channel, used on one event loop. ``open`` creates it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: Any) -> None:
        self._reader, self._writer = reader, writer
        self._codec: Codec[Send, Receive] = Codec(receives)
        self._buffer = bytearray()
        self._bodies: Iterator[bytes] = iter(())  # the frames that have arrived and are not decoded yet

    @classmethod
    async def open(cls, sock: socket.socket, receives: Any) -> AsyncChannel[Send, Receive]:
        """Create the end of ``sock``, which is taken from its object. ``receives``: see ``Codec``."""
        own = socket.socket(fileno=sock.detach())
        return cls(*await asyncio.open_connection(sock=own), receives)

    @property
    def is_closing(self) -> bool:
        """Whether the channel is closed, or found the other end gone while sending."""
        return self._writer.is_closing()

    def frame(self, record: Send | Heartbeat | Failure) -> bytes:
        """Return a record as a frame, for ``send_frame``."""
        return self._codec.frame(record)

    def send(self, record: Send | Heartbeat | Failure) -> None:
        """Queue a record. Does nothing if the other end is gone."""
        self.send_frame(self._codec.frame(record))

    def send_frame(self, frame: bytes) -> None:
        """Queue a frame that is encoded already, like ``send``."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def receive(self) -> Receive | None:
        """Return the next record; None if the other end is gone, also in the middle of a frame.

        Raises the error that the other end sends, and ``InvalidMessage``.
        """
        while True:
            for body in self._bodies:
                record = self._codec.record(body)
                if record is not None:
                    return record
            if not await self._read():
                return None

    async def records(self) -> AsyncIterator[Receive]:
        """Yield every record until the other end is gone. Raises like ``receive``, and is faster for many records."""
        while True:
            for body in self._bodies:
                if len(body) > _LARGE_FRAME:
                    await asyncio.sleep(0)  # yield to other tasks
                record = self._codec.record(body)
                if record is not None:
                    yield record
            if not await self._read():
                return

    async def _read(self) -> bool:
        """Read what has arrived; return False if the other end is gone."""
        try:
            data = await self._reader.read(1 << 18)
        except OSError:
            return False
        self._buffer += data
        self._bodies = iter(split(self._buffer))
        return bool(data)

    def close(self) -> None:
        """Close the connection after what is queued has been sent."""
        self._writer.close()
