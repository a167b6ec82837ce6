"""Messages between the HTTP process and the engine process: length-prefixed MessagePack frames over a socket pair.

A frame is a 4-byte big-endian length followed by one record of ``ToEngine`` or ``FromEngine``. Nothing is pickled:
decoding can only produce one of the types below, whatever bytes arrive.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from aiakq.errors import AiakqError, error
from aiakq.runtime.engine.adapters import AdapterRef
from aiakq.runtime.engine.messages import ModelLimits, RequestSpec, StepOutput
from aiakq.runtime.pooling_params import Pooling
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.structured.grammars import Grammar
from aiakq.runtime.structured.vocabulary import Vocabulary
from aiakq.runtime.text.tokenizer import TokenizerSource
from aiakq.system.frames import LENGTH, framed

#: Far above any real frame; a larger length means that the stream is out of step.
MAX_FRAME = 1 << 30


class Start(msgspec.Struct, tag="start"):
    """The first frame to the engine: its arguments, as ``aiakq.arguments.server.checked`` made them.

    cpus          processors that it may use; empty: all.
    replica       its number among ``num_replicas`` engines of the same server.
    """

    arguments: dict[str, Any]
    cpus: list[int] = []
    replica: int = 0
    num_replicas: int = 1


class SequenceFrame(msgspec.Struct):
    """A ``RequestSpec`` whose prompt, sampling parameters and grammar are given by their index in ``Submit``.

    grammar  -1: none.
    """

    request_id: str
    prompt: int
    sampling: int
    max_tokens: int
    seed: int
    eos_token_ids: list[int]
    bad_word_ids: list[list[int]]
    priority: int
    cache_salt: str
    client: str
    pooling: Pooling | None
    adapter: AdapterRef | None
    grammar: int


#: The fields of a sequence that are sent as they are.
_PLAIN_FIELDS = SequenceFrame.__struct_fields__[3:-1]


class Submit(msgspec.Struct, tag="submit"):
    """New sequences. What they have in common is sent once: prompts, and parameters with long lists of ids."""

    prompts: list[list[int]]
    samplings: list[SamplingParams]
    sequences: list[SequenceFrame]
    grammars: list[Grammar] = []

    @classmethod
    def of(cls, specs: Sequence[RequestSpec]) -> Submit:
        """The record for ``specs``."""
        prompts = {id(spec.prompt_token_ids): spec.prompt_token_ids for spec in specs}
        samplings = {id(spec.sampling): spec.sampling for spec in specs}
        prompt_index = {key: index for index, key in enumerate(prompts)}
        sampling_index = {key: index for index, key in enumerate(samplings)}
        grammars = {id(spec.grammar): spec.grammar for spec in specs if spec.grammar is not None}
        grammar_index = {key: index for index, key in enumerate(grammars)}
        sequences = [
            SequenceFrame(
                spec.request_id,
                prompt_index[id(spec.prompt_token_ids)],
                sampling_index[id(spec.sampling)],
                grammar=grammar_index.get(id(spec.grammar), -1),
                **{name: getattr(spec, name) for name in _PLAIN_FIELDS},
            )
            for spec in specs
        ]
        return cls(list(prompts.values()), list(samplings.values()), sequences, list(grammars.values()))

    def specs(self) -> list[RequestSpec]:
        """The sequences. Their lists are shared and must not be modified."""
        return [
            RequestSpec(
                sequence.request_id,
                self.prompts[sequence.prompt],
                self.samplings[sequence.sampling],
                grammar=None if sequence.grammar < 0 else self.grammars[sequence.grammar],
                **{name: getattr(sequence, name) for name in _PLAIN_FIELDS},
            )
            for sequence in self.sequences
        ]


class Cancel(msgspec.Struct, tag="cancel"):
    """Sequences to abort."""

    request_ids: list[str]


class GiveVocabulary(msgspec.Struct, tag="vocabulary"):
    """What grammars of requests are made of: a ``Vocabulary``, encoded when the tokenizer was loaded."""

    encoded: bytes

    def vocabulary(self) -> Vocabulary:
        return msgspec.msgpack.decode(self.encoded, type=Vocabulary)


class Reset(msgspec.Struct, tag="reset"):
    """Empty the prefix cache."""


class CheckAdapter(msgspec.Struct, tag="check_adapter"):
    """Check the LoRA adapter in the folder ``path``, which has to be inside ``root`` if that is given.

    number  of the answer.
    """

    number: int
    name: str
    path: str
    root: str | None


class Unload(msgspec.Struct, tag="unload"):
    """Drop an adapter from memory, by its key, once no request uses it."""

    key: str


class Configured(msgspec.Struct, tag="configured"):
    """The arguments are valid. What the HTTP process needs to prepare itself while weights load.

    sampling  default sampling values of the model's generation_config.json.
    files     of the model folder, as ``formats.model_folder.folder_identity`` tells them apart.
    """

    model: str
    tokenizer: TokenizerSource
    dtype: str
    sampling: dict[str, Any]
    files: dict[str, tuple[int, int, int, int]]


class Loading(msgspec.Struct, tag="loading"):
    """One phase of loading has finished."""

    name: str
    seconds: float
    detail: str


class Ready(msgspec.Struct, tag="ready"):
    """The engine takes requests. ``facts`` are for the start-up table, ``settings`` for the metrics."""

    limits: ModelLimits
    facts: dict[str, str]
    settings: dict[str, str]
    max_num_seqs: int


class Failed(msgspec.Struct, tag="failed"):
    """The error the engine ends with: an entry of the error registry and its fields."""

    id: str
    fields: dict[str, Any]


class AdapterChecked(msgspec.Struct, tag="adapter_checked"):
    """The answer to ``CheckAdapter``: the adapter, or why it cannot be used."""

    number: int
    adapter: AdapterRef | None = None
    failure: Failed | None = None


class Started(msgspec.Struct, tag="started"):
    """Requests that the step which runs now is the first for."""

    request_ids: list[str]


class Stepped(msgspec.Struct, tag="stepped"):
    """The output of one step."""

    output: StepOutput


ToEngine = Start | Submit | Cancel | Reset | GiveVocabulary | CheckAdapter | Unload
FromEngine = Configured | Loading | Ready | Failed | AdapterChecked | Started | Stepped

_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(record: ToEngine | FromEngine) -> bytes:
    """One record as bytes, length first."""
    body = _encoder.encode(record)
    assert len(body) <= MAX_FRAME, f"a frame of {len(body)} bytes"
    return framed(body)


def split(buffer: bytearray) -> list[bytes]:
    """Cut every complete frame off the front of ``buffer``, which is modified; the bodies, in order."""
    bodies: list[bytes] = []
    start = 0
    while len(buffer) - start >= LENGTH.size:
        (length,) = LENGTH.unpack_from(buffer, start)
        assert length <= MAX_FRAME, f"a frame of {length} bytes"
        end = start + LENGTH.size + length
        if end > len(buffer):
            break
        bodies.append(bytes(buffer[start + LENGTH.size : end]))
        start = end
    if start:
        del buffer[:start]
    return bodies


def encode_error(failure: AiakqError) -> Failed:
    """The record for an error. Fields that MessagePack cannot hold become text."""
    return Failed(failure.id, failure.plain_fields)


def decode_error(record: Failed) -> AiakqError:
    """The error of a ``Failed`` record."""
    return error(record.id, **record.fields)


def call_on_hangup(sock: socket.socket, callback: Callable[[], None]) -> None:
    """Call ``callback`` in a thread once the other end of ``sock`` is closed, also if its process was killed."""

    def wait() -> None:
        poll = select.poll()
        poll.register(sock, 0)  # hang-up and error are always reported
        poll.poll()
        callback()

    threading.Thread(target=wait, name="hangup", daemon=True).start()


class EngineLink:
    """The engine's end of the socket pair: sends block, receives block on request."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.socket.setblocking(True)
        self._buffer = bytearray()

    def send(self, record: FromEngine) -> None:
        """Send one record. Blocks while the socket's buffer is full."""
        self.socket.sendall(frame(record))

    def receive(self, *, wait: bool) -> list[ToEngine] | None:
        """All complete records that have arrived; with ``wait``, block for at least one. None if the peer is gone."""
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
