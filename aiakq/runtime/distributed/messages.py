"""Messages between rank 0 and the other ranks, and the channel they pass through.

Rank 0 holds the engine and decides everything; the others carry out what it sends. Nothing is pickled: decoding can
only produce one of the records below, whatever bytes arrive. A frame is a 4-byte big-endian length and one record in
MessagePack.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec

from aiakq.runtime.engine.records import StepBatch, StepResult
from aiakq.runtime.structured.grammars import Grammar
from aiakq.runtime.structured.vocabulary import Vocabulary
from aiakq.system.frames import framed, receive_frame


class Load(msgspec.Struct, tag="load"):
    """The first message: what to load, and with whom.

    arguments   the engine's, as they were given.
    rank        its number among all ranks: those of the first stage come first.
    size        ranks of a stage.
    num_stages  groups of such ranks.
    host_ranks  ranks that share the memory of this machine.
    transport   how the ranks of the stage meet; see collectives.py.
    memory      number of the inherited descriptor of what they share for that; None: it has one.
    gpu         the device's number in this process; None: it computes on the CPU.
    link_in     the same of the socket from the stage before; None in the first stage.
    link_out    the same of the socket to the stage after; None in the last stage.
    threads     of this rank.
    cpus        that this rank may use; empty: all.
    addresses   where the ranks listen for each other, if they were not given descriptors.
    """

    arguments: dict[str, Any]
    rank: int
    size: int
    num_stages: int
    host_ranks: int
    transport: str
    memory: int | None
    gpu: int | None
    link_in: int | None
    link_out: int | None
    threads: int
    cpus: list[int]
    time_limit: float
    addresses: list[tuple[str, int]] = []

    @property
    def stage(self) -> int:
        """The number of its stage."""
        return self.rank // self.size

    @property
    def place(self) -> int:
        """Its number within the stage."""
        return self.rank % self.size


class Listening(msgspec.Struct, tag="listening"):
    """The process runs, and others may connect to it: the first message of a rank that was given no descriptors."""

    host: str
    port: int


class RankLoaded(msgspec.Struct, tag="loaded"):
    """The model is loaded. ``checkpoint`` and ``version`` must be those of rank 0.

    sharing  how the ranks of its stage share layers, in words, which must be the same for all of them.
    """

    version: str
    checkpoint: str
    sharing: str


class CountPages(msgspec.Struct, tag="count"):
    """How many pages would fit into the memory that is left?"""


class PagesCounted(msgspec.Struct, tag="counted"):
    """So many."""

    pages: int


class Configure(msgspec.Struct, tag="configure"):
    """The sizes that rank 0 has settled on: of the cache, and of the largest step."""

    num_pages: int
    num_slots: int
    tokens: int
    rows: int
    length: int


class RankReady(msgspec.Struct, tag="ready"):
    """The rank takes steps. ``captures`` must be the same in all ranks of its stage: whether it has captured them."""

    captures: bool


class Batch(msgspec.Struct, tag="batch"):
    """The next step; ``Launch`` or ``Abandon`` follows."""

    batch: StepBatch


class Launch(msgspec.Struct, tag="launch"):
    """Compute the step.

    number          of the step, counted from 0.
    unknown_tokens  those that the step before sampled, in the order in which this one needs them; none if the
                    collective broadcasts them.
    digest          of the step's input on rank 0.
    """

    number: int
    unknown_tokens: list[int]
    digest: int


class Abandon(msgspec.Struct, tag="abandon"):
    """Do not compute the steps from ``number`` on, or forget that they were begun; answered with ``Abandoned``."""

    number: int


class Abandoned(msgspec.Struct, tag="abandoned"):
    """The rank waits for the next step."""


class Resume(msgspec.Struct, tag="resume"):
    """All ranks have abandoned their steps; answered with ``Resumed``."""


class Resumed(msgspec.Struct, tag="resumed"):
    """The ranks of this one's stage may meet again."""


class UseVocabulary(msgspec.Struct, tag="vocabulary"):
    """What grammars of sequences are made of, for the rank that samples."""

    vocabulary: Vocabulary


class PrepareGrammar(msgspec.Struct, tag="grammar"):
    """Sequences with this grammar will follow."""

    grammar: Grammar


class Sampled(msgspec.Struct, tag="sampled"):
    """What the oldest step sampled: for each of its chunks the tokens that continue its sequence."""

    tokens: list[list[int]]


class ResetSequences(msgspec.Struct, tag="reset"):
    """Drop all sequences."""


class Results(msgspec.Struct, tag="results"):
    """What the last stage sampled in a step."""

    number: int
    result: StepResult


class OutOfMemory(msgspec.Struct, tag="out_of_memory"):
    """The step does not fit into this rank's memory; rank 0 abandons it."""

    number: int


class Alive(msgspec.Struct, tag="alive"):
    """Sent now and then during a step: the process runs."""


class RankFailed(msgspec.Struct, tag="failed"):
    """The error this rank ends with: an entry of the error registry and its fields."""

    id: str
    fields: dict[str, Any]


ToRank = (
    Load
    | CountPages
    | Configure
    | Batch
    | Launch
    | Abandon
    | Resume
    | Sampled
    | ResetSequences
    | UseVocabulary
    | PrepareGrammar
)
FromRank = (
    Listening | RankLoaded | PagesCounted | RankReady | Abandoned | Resumed | Results | OutOfMemory | Alive | RankFailed
)

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
_decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


def frame(record: ToRank | FromRank) -> bytes:
    """One record as bytes, length first."""
    return framed(_encoder.encode(record))


class Channel:
    """One end of a connection. Sends and receives block; several threads may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._sending = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Send a frame. Raises OSError if the other end is gone."""
        with self._sending:
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
