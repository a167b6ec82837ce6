"""What the HTTP process and the engine process say to each other: length-prefixed MessagePack frames on a socketpair.

A frame is four bytes of length, big-endian, then one record of ``ToEngine`` or ``FromEngine``. Nothing is pickled:
a record can only become one of the types below, whoever wrote the bytes.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from aiakq.errors import AiakqError, error
from aiakq.runtime.engine.messages import ModelLimits, RequestSpec, StepOutput
from aiakq.runtime.text.tokenizer import TokenizerSource

_LENGTH = struct.Struct(">I")
#: Far above any real frame; a larger length means the two sides have lost each other.
MAX_FRAME = 1 << 30


class Start(msgspec.Struct, tag="start"):
    """The first frame to the engine: its arguments, as ``aiakq.arguments.server.checked`` made them."""

    arguments: dict[str, Any]


class Submit(msgspec.Struct, tag="submit"):
    """New sequences."""

    requests: list[RequestSpec]


class Cancel(msgspec.Struct, tag="cancel"):
    """Sequences nobody waits for any more."""

    request_ids: list[str]


class Reset(msgspec.Struct, tag="reset"):
    """Forget what later prompts could reuse."""


class Configured(msgspec.Struct, tag="configured"):
    """The arguments were understood; what the HTTP side can prepare while weights load.

    sampling  default sampling values of the model's generation_config.json.
    """

    model: str
    tokenizer: TokenizerSource
    dtype: str
    sampling: dict[str, Any]


class Loading(msgspec.Struct, tag="loading"):
    """One phase of loading ended."""

    name: str
    seconds: float
    detail: str


class Ready(msgspec.Struct, tag="ready"):
    """The engine takes requests. ``facts`` and ``settings`` are for people: the start-up table and the metrics."""

    limits: ModelLimits
    facts: dict[str, str]
    settings: dict[str, str]
    max_num_seqs: int


class Failed(msgspec.Struct, tag="failed"):
    """The engine ends because of this: an entry of the error registry and its fields."""

    id: str
    fields: dict[str, Any]


class Stepped(msgspec.Struct, tag="stepped"):
    """One step was run."""

    output: StepOutput


ToEngine = Start | Submit | Cancel | Reset
FromEngine = Configured | Loading | Ready | Failed | Stepped

_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(record: ToEngine | FromEngine) -> bytes:
    """One record as bytes, length first."""
    body = _encoder.encode(record)
    assert len(body) <= MAX_FRAME, f"a frame of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


def split(buffer: bytearray) -> list[bytes]:
    """Cut every complete frame off the front of ``buffer``, which is modified; the bodies, in order."""
    bodies: list[bytes] = []
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer, start)
        assert length <= MAX_FRAME, f"a frame of {length} bytes"
        end = start + _LENGTH.size + length
        if end > len(buffer):
            break
        bodies.append(bytes(buffer[start + _LENGTH.size : end]))
        start = end
    if start:
        del buffer[:start]
    return bodies


def failed(failure: AiakqError) -> Failed:
    """The frame for an error; fields that MessagePack does not know become text."""
    plain = (str, int, float, bool, type(None))
    fields = {name: value if isinstance(value, plain) else str(value) for name, value in failure.fields.items()}
    return Failed(failure.id, fields)


def rebuilt(record: Failed) -> AiakqError:
    """The error a ``Failed`` frame stands for."""
    return error(record.id, **record.fields)


def on_hangup(sock: socket.socket, call: Callable[[], None]) -> None:
    """Call ``call`` in a thread of its own once the other end of ``sock`` is closed, also by the death of its owner."""

    def wait() -> None:
        poll = select.poll()
        poll.register(sock, 0)  # hang-up and error are always reported
        poll.poll()
        call()

    threading.Thread(target=wait, name="hangup", daemon=True).start()


class EngineLink:
    """The engine's end of the socketpair: blocking sends, and receives that wait only when told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.socket.setblocking(True)
        self._buffer = bytearray()

    def send(self, record: FromEngine) -> None:
        """Send one record; waits while the HTTP process has not read the ones before it."""
        self.socket.sendall(frame(record))

    def receive(self, *, wait: bool) -> list[ToEngine] | None:
        """Every complete record that has arrived; with ``wait``, at least one. None: the other side is gone."""
        bodies: list[bytes] = []
        while True:
            flags = 0 if wait and not bodies else socket.MSG_DONTWAIT
            try:
                data = self.socket.recv(1 << 18, flags)
            except BlockingIOError:
                break
            except ConnectionError:
                return None
            if not data:
                return None
            self._buffer += data
            bodies += split(self._buffer)
        return [decode_to_engine(body) for body in bodies]
