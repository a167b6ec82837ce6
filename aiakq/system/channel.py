"""Channel: records between two processes over a stream socket, which is a local socket pair or a TCP connection.

A record travels as a frame: a 4-byte big-endian length, then MessagePack or JSON. Nothing is pickled: decoding can only
produce the records that the receiving end names, whatever bytes arrive. Raw bytes, such as those of tensors, may follow
a frame. Two records belong to the channel itself: ``Heartbeat``, which is never returned, and ``Failure``, which raises
the error of the other end.

The other end may exit at any byte: ``receive`` then returns None, also after a part of a frame, and ``send`` raises
``Disconnected``. If it is stopped, ``heard`` does not advance and ``send`` stalls. Data that it cannot have meant raise
``InvalidMessage``.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Generic, TypeVar

import msgspec

from aiakq.errors import AiakqError, error

Send = TypeVar("Send")
Receive = TypeVar("Receive")

LENGTH = struct.Struct(">I")
#: Maximum length of a frame in bytes, far above any real one; a larger length means that the stream is corrupt.
MAX_FRAME = 1 << 30
#: Code of integers of more than 64 bits, which MessagePack does not have.
_LONG_INTEGER = 1


class Disconnected(ConnectionError):
    """The other end of a channel is gone."""


class InvalidMessage(ValueError):
    """The other end sent data that are no record of the channel."""


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """The process is alive."""


class Failure(msgspec.Struct, tag="failure"):
    """An error: the id of an entry of the error registry, and its fields."""

    id: str
    fields: dict[str, Any]

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


class Codec(Generic[Send, Receive]):
    """Converts records to frames and back.

    receives  type of the records to decode: a struct, or a union of tagged structs.
    as_json   use JSON instead of MessagePack, for a process without msgspec.
    enc_hook  converts values that cannot be encoded; if not given, only paths can.
    """

    def __init__(self, receives: Any, as_json: bool = False, enc_hook: Callable[[Any], Any] | None = None) -> None:
        enc_hook = enc_hook or _path_as_text
        every = receives | Heartbeat | Failure
        self._enc_hook = enc_hook
        if as_json:
            self._encode = msgspec.json.Encoder(enc_hook=enc_hook).encode
            self._decode: Callable[[bytes | bytearray], Any] = msgspec.json.Decoder(every, dec_hook=_path_of).decode
        else:
            self._encode = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode
            self._decode = msgspec.msgpack.Decoder(every, ext_hook=_long_integer, dec_hook=_path_of).decode

    def frame(self, record: Send | Heartbeat | Failure) -> bytes:
        """Return a record as a frame. Raises ValueError if it is too long."""
        try:
            body = self._encode(record)
        except OverflowError:
            plain = msgspec.to_builtins(record, builtin_types=(bytes,), enc_hook=self._enc_hook)
            body = self._encode(_with_long_integers(plain))
        if len(body) > MAX_FRAME:
            raise ValueError(f"a frame of {len(body)} bytes")
        return LENGTH.pack(len(body)) + body

    def record(self, body: bytes | bytearray) -> Receive | None:
        """Return the record of a frame; None for a heartbeat. Raises the other end's error, and ``InvalidMessage``."""
        try:
            record = self._decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
            raise InvalidMessage(str(problem)) from problem
        kind = type(record)  # faster than isinstance
        if kind is Failure:
            raise record.error()
        return None if kind is Heartbeat else record


def split(buffer: bytearray) -> list[bytes]:
    """Remove all complete frames from the front of ``buffer``, and return their bodies in order.

    Raises ``InvalidMessage``.
    """
    bodies: list[bytes] = []
    start = 0
    while len(buffer) - start >= LENGTH.size:
        end = start + LENGTH.size + length_at(buffer, start)
        if end > len(buffer):
            break
        bodies.append(bytes(buffer[start + LENGTH.size : end]))
        start = end
    if start:
        del buffer[:start]
    return bodies


def length_at(buffer: bytearray, start: int = 0) -> int:
    """Return the length of the frame that begins at ``start``. Raises ``InvalidMessage``."""
    length: int = LENGTH.unpack_from(buffer, start)[0]
    if length > MAX_FRAME:
        raise InvalidMessage(f"a frame of {length} bytes")
    return length


class Channel(Generic[Send, Receive]):
    """One end of a channel that blocks. Any number of threads may send, one may receive.

    socket      the stream socket, whose owner this is.
    heard       when the last bytes arrived (``time.monotonic``).
    frame_size  length of the frame that ``receive`` returned last, in bytes.
    """

    def __init__(
        self,
        sock: socket.socket,
        receives: Any,
        as_json: bool = False,
        enc_hook: Callable[[Any], Any] | None = None,
    ) -> None:
        """For the other arguments, see ``Codec``."""
        sock.setblocking(True)
        self.socket = sock
        self.heard = time.monotonic()
        self.frame_size = 0
        self._codec: Codec[Send, Receive] = Codec(receives, as_json, enc_hook)
        self._buffer = bytearray()
        self._sending = threading.Lock()
        self._on_stall: Callable[[], None] | None = None
        self._is_cut = False  # whether a frame was sent only in part

    # --- sending ---

    def limit_sending(self, seconds: float, on_stall: Callable[[], None] | None = None) -> None:
        """Make ``send`` call ``on_stall`` whenever it could send nothing for ``seconds``; it raises to give up.

        Without ``on_stall``, ``send`` raises TimeoutError.
        """
        whole, rest = divmod(seconds, 1.0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(rest * 1e6)))
        self._on_stall = on_stall

    def frame(self, record: Send | Heartbeat | Failure) -> bytes:
        """Return a record as a frame, for ``send_frame``."""
        return self._codec.frame(record)

    def send(self, record: Send | Heartbeat | Failure, *payload: memoryview) -> None:
        """Send a record, followed by the bytes of ``payload``. Raises ``Disconnected``; see also ``limit_sending``."""
        self.send_frame(self._codec.frame(record), *payload)

    def send_frame(self, *parts: bytes | memoryview) -> None:
        """Send a frame that is encoded already, and the bytes that follow it, like ``send``."""
        with self._sending:
            if self._is_cut:
                raise Disconnected("an earlier frame was not sent as a whole")
            try:
                for part in parts:
                    self._send_all(part)
            except BaseException:
                self._is_cut = True
                raise

    def send_failure(self, failure: AiakqError) -> None:
        """Send an error, which ``receive`` raises at the other end. Raises ``Disconnected``."""
        self.send(Failure.of(failure))

    def send_heartbeats(self, seconds: float, on_gone: Callable[[], None] = lambda: None) -> HeartbeatSender:
        """Send heartbeats from a thread; see ``HeartbeatSender``."""
        sender = HeartbeatSender(self, seconds, on_gone)
        sender.start()
        return sender

    def _send_all(self, part: bytes | memoryview) -> None:
        view = memoryview(part)
        while view:
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                if self._on_stall is None:
                    raise TimeoutError("the other end reads nothing") from None
                self._on_stall()
            except OSError as failure:
                raise Disconnected(str(failure)) from failure

    # --- receiving ---

    def receive(self, seconds: float | None = None) -> Receive | None:
        """Return the next record; None if the other end is gone.

        Raises the error that the other end sends, ``InvalidMessage``, and TimeoutError after ``seconds``.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            if not self._fill(LENGTH.size, deadline):
                return None
            end = LENGTH.size + length_at(self._buffer)
            if not self._fill(end, deadline):
                return None
            body = self._buffer[LENGTH.size : end]
            del self._buffer[:end]
            self.frame_size = len(body)
            record = self._codec.record(body)
            if record is not None:
                return record

    def receive_all(self, *, wait: bool) -> list[Receive] | None:
        """Return all complete records that have arrived, or None if the other end is gone; ``wait`` blocks for the
        first. Raises like ``receive``.
        """
        records = self._complete()
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
            self.heard = time.monotonic()
            self._buffer += data
            records += self._complete()

    def receive_into(self, view: memoryview) -> None:
        """Receive the bytes that follow a frame into all of ``view``. Raises ``Disconnected``."""
        if self._buffer and view:
            buffered = min(len(view), len(self._buffer))
            view[:buffered] = self._buffer[:buffered]
            del self._buffer[:buffered]
            view = view[buffered:]
        while view:
            try:
                count = self.socket.recv_into(view[: 1 << 24])
            except OSError:
                count = 0
            if not count:
                raise Disconnected("the other end is gone")
            self.heard = time.monotonic()
            view = view[count:]

    def follow(self, on_record: Callable[[Receive], None]) -> AiakqError | None:
        """Pass every record to ``on_record`` until the other end is gone or sends an error, which is returned.

        Raises ``InvalidMessage``.
        """
        try:
            while (record := self.receive()) is not None:
                on_record(record)
        except AiakqError as failure:
            return failure
        return None

    def _complete(self) -> list[Receive]:
        records = map(self._codec.record, split(self._buffer) if self._buffer else ())
        return [record for record in records if record is not None]

    def _fill(self, count: int, deadline: float | None) -> bool:
        """Receive until the buffer holds ``count`` bytes; return False if the other end is gone before."""
        while len(self._buffer) < count:
            if deadline is not None and not is_readable(self.socket, max(0.0, deadline - time.monotonic())):
                raise TimeoutError("the other end sends nothing")
            try:
                data = self.socket.recv(min(1 << 20, count - len(self._buffer)))
            except OSError:
                return False
            if not data:
                return False
            self.heard = time.monotonic()
            self._buffer += data
        return True

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


class HeartbeatSender(threading.Thread):
    """Sends a heartbeat every ``seconds`` while ``busy`` is set, as it is at first.

    on_gone  called when the other end is gone.
    """

    def __init__(self, channel: Channel[Any, Any], seconds: float, on_gone: Callable[[], None] = lambda: None) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.busy = threading.Event()
        self.busy.set()
        self._channel, self._seconds, self._on_gone = channel, seconds, on_gone
        self._never = threading.Event()

    def run(self) -> None:
        frame = self._channel.frame(Heartbeat())
        try:
            while self.busy.wait():
                self._channel.send_frame(frame)
                self._never.wait(self._seconds)
        except OSError:
            self._on_gone()


def is_readable(sock: socket.socket, seconds: float) -> bool:
    """Wait up to ``seconds`` until data can be received, or the other end is gone."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    """Receive ``count`` bytes from a blocking socket; None if the other end is gone before. Raises ConnectionError."""
    received = bytearray()
    while len(received) < count:
        piece = sock.recv(min(1 << 20, count - len(received)))
        if not piece:
            return None
        received += piece
    return bytes(received)


def _path_as_text(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _path_of(kind: type, value: Any) -> Any:
    if issubclass(kind, PurePath):
        return kind(value)
    raise TypeError(f"a {kind.__name__} cannot be received")


def _with_long_integers(value: Any) -> Any:
    """Return ``value`` with integers of more than 64 bits as extensions of MessagePack."""
    if isinstance(value, dict):
        return {name: _with_long_integers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_with_long_integers, value))
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return msgspec.msgpack.Ext(_LONG_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    return value


def _long_integer(code: int, data: memoryview) -> Any:
    if code != _LONG_INTEGER:
        raise ValueError(f"an extension {code}")
    return int.from_bytes(data, "big", signed=True)
