"""AsyncChannel: the end of a channel (channel.py) on an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Generic

from aiakq.system.channel import Receive, RecordDecoder, Send, framed, split

#: Size in bytes above which a frame takes milliseconds to decode, for example with prompt log-probabilities.
_LARGE_FRAME = 256 << 10


class AsyncChannel(RecordDecoder[Receive], Generic[Send, Receive]):
    """One end of a channel, used on one event loop. ``open`` creates it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: object) -> None:
        super().__init__(receives)
        self._reader, self._writer = reader, writer
        self._buffer = bytearray()
        self._bodies: Iterator[bytes] = iter(())  # the frames that have arrived and are not decoded yet

    @classmethod
    async def open(cls, sock: socket.socket, receives: object) -> AsyncChannel[Send, Receive]:
        """Create the end of ``sock``, which is taken from its object."""
        own = socket.socket(fileno=sock.detach())
        return cls(*await asyncio.open_connection(sock=own), receives)

    def send(self, record: Send) -> None:
        """Queue a record. Does nothing if the other end is gone."""
        self.send_bytes(framed(record))

    def send_bytes(self, frame: bytes) -> None:
        """Queue a frame that is encoded already, like ``send``."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def receive(self) -> Receive | None:
        """Return the next record; None if the other end is gone, also in the middle of a frame.

        Raises the error that the other end sends, and ``InvalidMessage``.
        """
        while True:
            for body in self._bodies:
                if len(body) > _LARGE_FRAME:
                    await asyncio.sleep(0)  # yield to other tasks
                if (record := self.decode(body)) is not None:
                    return record
            try:
                data = await self._reader.read(1 << 18)
            except OSError:
                return None
            if not data:
                return None
            self._buffer += data
            self._bodies = iter(split(self._buffer))

    def close(self) -> None:
        """Close the connection after what is queued has been sent."""
        self._writer.close()
