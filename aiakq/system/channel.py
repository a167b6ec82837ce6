"""Channel: records between two processes over a stream socket, which is a local socket pair or a TCP connection.

All processes of this program talk over channels: the server with its engines and tokenizers, the ranks of a model, the
workers of ``quantize``, the clients of ``bench``. Each of them defines only its records, which are tagged structs.

A record travels as a frame: a 4-byte big-endian length, then MessagePack, or a JSON object. Nothing is pickled:
decoding can only produce the records that the receiving end names, whatever bytes arrive. Raw bytes, such as those of
tensors, may follow a frame. Two records belong to the channel itself: ``Heartbeat``, which is never returned, and
``Failure``, which raises the error of the other end.

The other end may exit at any byte: ``receive`` then returns None, also after a part of a frame, and ``send`` raises
``Disconnected``. If it is stopped, ``heard`` does not advance and ``send`` stalls. Data that it cannot have meant raise
``InvalidMessage``.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from aiakq.errors import AiakqError, error

Send = TypeVar("Send")
Receive = TypeVar("Receive")

LENGTH = struct.Struct(">I")
#: Maximum length of a frame in bytes, far above any real one; a larger length means that the stream is corrupt.
MAX_FRAME = 1 << 30


class Disconnected(ConnectionError):
    """The other end of a channel is gone."""


class InvalidMessage(ValueError):
    """The other end sent data that are no record of the channel."""


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """The process is alive."""


class Failure(msgspec.Struct, tag="failure"):
    """An error: the id of an entry of the error registry, and its fields."""

    id: str
    fields: dict[str, object]

    @classmethod
    def of(cls, failure: AiakqError) -> Failure:
        """Return the record of an error; fields that cannot be encoded become text."""
        return cls(failure.id, failure.plain_fields)

    def error(self) -> AiakqError:
        """Return the error. Raises ``InvalidMessage`` if the registry has no such error."""
        try:
            return error(self.id, **self.fields)
        except (KeyError, TypeError, ValueError, IndexError) as problem:
            raise InvalidMessage(f"an unknown error {self.id!r}") from problem


_encode = msgspec.msgpack.Encoder(enc_hook=str).encode


def framed(record: object) -> bytes:
    """Return a record as a frame. Values that MessagePack does not have, such as paths, become text."""
    try:
        body = _encode(record)
    except OverflowError:  # MessagePack has no integers of more than 64 bits, JSON has
        body = json.dumps(msgspec.to_builtins(record, enc_hook=str)).encode()
    return LENGTH.pack(len(body)) + body


class RecordDecoder(Generic[Receive]):
    """Decodes frames to records of the type ``receives``: a tagged struct, or a union of them."""

    def __init__(self, receives: object) -> None:
        every = receives | Heartbeat | Failure
        self._decode = msgspec.msgpack.Decoder(every, dec_hook=_converted).decode
        self._decode_json = msgspec.json.Decoder(every, dec_hook=_converted).decode

    def decode(self, body: bytes | bytearray) -> Receive | None:
        """Return the record of a frame; None for a heartbeat. Raises the other end's error, and ``InvalidMessage``."""
        try:
            record = self._decode_json(body) if body[:1] == b"{" else self._decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
            raise InvalidMessage(str(problem)) from problem
        kind = type(record)  # faster than isinstance
        if kind is Failure:
            raise record.error()
        return None if kind is Heartbeat else record


def _converted(kind: type, value: object) -> object:
    """Return ``value`` as an object of a field's type that msgspec does not know, such as a path."""
    return value if isinstance(value, kind) else kind(value)


def split(buffer: bytearray) -> list[bytes]:
    """Remove all complete frames from the front of ``buffer``, and return their bodies. Raises ``InvalidMessage``."""
    bodies: list[bytes] = []
    start = 0
    while len(buffer) - start >= LENGTH.size:
        end = start + LENGTH.size + _length(buffer, start)
        if end > len(buffer):
            break
        bodies.append(bytes(buffer[start + LENGTH.size : end]))
        start = end
    if start:
        del buffer[:start]
    return bodies


def _length(buffer: bytearray, start: int = 0) -> int:
    length: int = LENGTH.unpack_from(buffer, start)[0]
    if length > MAX_FRAME:
        raise InvalidMessage(f"a frame of {length} bytes")
    return length


class Channel(RecordDecoder[Receive], Generic[Send, Receive]):
    """One end of a channel that blocks. Any number of threads may send, one may receive.

    socket  the stream socket, whose owner this is.
    heard   when the last bytes arrived (``time.monotonic``).
    busy    whether to send heartbeats; see ``send_heartbeats``.
    """

    def __init__(self, sock: socket.socket, receives: object) -> None:
        super().__init__(receives)
        sock.setblocking(True)
        self.socket = sock
        self.heard = time.monotonic()
        self.busy = threading.Event()
        self.busy.set()
        self._buffer = bytearray()
        self._sending = threading.Lock()
        self._on_stall: Callable[[], None] = lambda: None

    # --- sending ---

    def send(self, record: Send | Heartbeat | Failure, *payload: memoryview) -> None:
        """Send a record, followed by the bytes of ``payload``. Raises ``Disconnected``; see also ``limit_sending``."""
        self.send_bytes(framed(record), *payload)

    def send_bytes(self, *parts: bytes | memoryview) -> None:
        """Send frames that are encoded already, like ``send``."""
        with self._sending:
            for part in parts:
                while part:
                    try:
                        part = memoryview(part)[self.socket.send(part) :]
                    except BlockingIOError:
                        self._on_stall()
                    except OSError as failure:
                        raise Disconnected(str(failure)) from failure

    def send_failure(self, failure: AiakqError) -> None:
        """Send an error, which ``receive`` raises at the other end, unless that is gone."""
        with contextlib.suppress(Disconnected):
            self.send(Failure.of(failure))

    def send_heartbeats(self, seconds: float, on_gone: Callable[[], None] = lambda: None) -> None:
        """Send a heartbeat every ``seconds`` from a thread while ``busy`` is set, as it is at first.

        on_gone  called when the other end is gone.
        """
        frame = framed(Heartbeat())

        def run() -> None:
            with contextlib.suppress(Disconnected):
                while self.busy.wait():
                    self.send_bytes(frame)
                    time.sleep(seconds)
            on_gone()

        threading.Thread(target=run, name="heartbeat", daemon=True).start()

    def limit_sending(self, seconds: float, on_stall: Callable[[], None]) -> None:
        """Make ``send`` call ``on_stall`` whenever it could send nothing for ``seconds``; it raises to give up."""
        whole, rest = divmod(seconds, 1.0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(rest * 1e6)))
        self._on_stall = on_stall

    # --- receiving ---

    def receive(self, seconds: float | None = None) -> Receive | None:
        """Return the next record; None if the other end is gone.

        Reads no more than the record's frame from the socket. Raises the error that the other end sends,
        ``InvalidMessage``, and TimeoutError after ``seconds``.
        """
        deadline, head = None if seconds is None else time.monotonic() + seconds, bytearray(LENGTH.size)
        try:
            while True:
                self.receive_into(memoryview(head), deadline)
                body = bytearray(_length(head))
                self.receive_into(memoryview(body), deadline)
                if (record := self.decode(body)) is not None:
                    return record
        except Disconnected:
            return None

    def receive_into(self, view: memoryview, deadline: float | None = None) -> None:
        """Receive the bytes that follow a frame into all of ``view``. Raises ``Disconnected`` and TimeoutError."""
        while view:
            if deadline is not None:
                poll = select.poll()
                poll.register(self.socket, select.POLLIN)
                if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                    raise TimeoutError("the other end sends nothing")
            try:
                count = self.socket.recv_into(view, min(len(view), 1 << 24))
            except OSError as failure:
                raise Disconnected(str(failure)) from failure
            if not count:
                raise Disconnected("the other end is gone")
            self.heard = time.monotonic()
            view = view[count:]

    def receive_all(self, *, wait: bool) -> list[Receive] | None:
        """Return all complete records that have arrived, or None if the other end is gone; ``wait`` blocks for the
        first. Raises like ``receive``, which must not be called after it.
        """
        records: list[Receive] = []
        while True:
            flags = 0 if wait and not records else socket.MSG_DONTWAIT
            try:
                data = self.socket.recv(1 << 18, flags)
            except BlockingIOError:
                return records
            except OSError:
                return None
            if not data:
                return None
            self._buffer += data
            records += [record for body in split(self._buffer) if (record := self.decode(body)) is not None]

    # --- the end ---

    def on_hangup(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in a thread when the other end is closed, even if its process was killed."""

        def wait() -> None:
            poll = select.poll()
            poll.register(self.socket, 0)  # hang-up and error are always reported
            poll.poll()
            callback()

        threading.Thread(target=wait, name="hangup", daemon=True).start()

    def hang_up(self) -> None:
        """Shut the connection down, which ends both directions, and wakes a thread that receives."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
