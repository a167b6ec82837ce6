"""Messages between rank 0 and the other ranks, and the channel they pass through.

Rank 0 holds the engine and decides everything; the others carry out what it sends. Nothing is pickled: decoding can
only produce one of the records below, whatever bytes arrive. A frame is a 4-byte big-endian length and one record in
MessagePack.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from aiakq.runtime.engine.records import StepBatch
from aiakq.system.frames import framed, receive_frame


class Load(msgspec.Struct, tag="load"):
    """The first message: what to load, and with whom.

    arguments  the engine's, as they were given.
    memory     number of the inherited descriptor of the memory that all ranks share.
    threads    of this rank.
    cpus       that this rank may use; empty: all.
    """

    arguments: dict[str, Any]
    rank: int
    size: int
    memory: int
    threads: int
    cpus: list[int]
    time_limit: float


class RankLoaded(msgspec.Struct, tag="loaded"):
    """The model is loaded. ``checkpoint`` and ``version`` must be those of rank 0."""

    version: str
    checkpoint: str


class Configure(msgspec.Struct, tag="configure"):
    """The sizes that rank 0 has settled on: of the cache, and of the largest step."""

    num_pages: int
    num_slots: int
    tokens: int
    rows: int
    length: int


class RankReady(msgspec.Struct, tag="ready"):
    """The rank takes steps."""


class Batch(msgspec.Struct, tag="batch"):
    """The next step; ``Launch`` or ``Abandon`` follows."""

    batch: StepBatch


class Launch(msgspec.Struct, tag="launch"):
    """Compute the step.

    unknown_tokens  those that the step before sampled, in the order in which this one needs them.
    digest          of the step's input on rank 0.
    """

    unknown_tokens: list[int]
    digest: int


class Abandon(msgspec.Struct, tag="abandon"):
    """Do not compute the step, or forget that it was begun; answered with ``Abandoned``."""


class Abandoned(msgspec.Struct, tag="abandoned"):
    """The rank waits for the next step."""


class Sampled(msgspec.Struct, tag="sampled"):
    """What the oldest step sampled: for each of its chunks a token, or None if it continues no sequence."""

    tokens: list[int | None]


class ResetSequences(msgspec.Struct, tag="reset"):
    """Drop all sequences."""


class OutOfMemory(msgspec.Struct, tag="out_of_memory"):
    """The step does not fit into this rank's memory; rank 0 abandons it."""


class RankFailed(msgspec.Struct, tag="failed"):
    """The error this rank ends with: an entry of the error registry and its fields."""

    id: str
    fields: dict[str, Any]


ToRank = Load | Configure | Batch | Launch | Abandon | Sampled | ResetSequences
FromRank = RankLoaded | RankReady | Abandoned | OutOfMemory | RankFailed

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
_decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


def frame(record: ToRank | FromRank) -> bytes:
    """One record as bytes, length first."""
    return framed(_encoder.encode(record))


class Channel:
    """One end of a socket pair. Sends and receives block."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send(self, frame: bytes) -> None:
        """Send a frame. Raises OSError if the other end is gone."""
        self.socket.sendall(frame)

    def receive_at_rank(self) -> ToRank | None:
        """The next message from rank 0; None if it is gone."""
        body = self._receive()
        return None if body is None else _decode_to_rank(body)

    def receive_from_rank(self) -> FromRank | None:
        """The next message of a rank; None if it is gone."""
        body = self._receive()
        return None if body is None else _decode_from_rank(body)

    def _receive(self) -> bytes | None:
        try:
            return receive_frame(self.socket)
        except ConnectionError:
            return None
