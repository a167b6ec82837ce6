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

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.command import Command
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import StepOutput
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.text.tokenizer import TokenizerSource
from aiakq.system.frames import LENGTH, framed

#: Maximum length of a frame, far above any real one; a larger length means that the stream is corrupt.
MAX_FRAME = 1 << 30


class Start(msgspec.Struct, tag="start"):
    """The first frame to the engine: its arguments.

    cpus          processors that it may use; empty for all.
    replica       index among the ``num_replicas`` engines of the server.
    """

    arguments: EngineArguments
    cpus: list[int] = []
    replica: int = 0
    num_replicas: int = 1


#: The fields of ``RequestSpec`` whose values sequences share, such as long lists of ids.
_SHARED = ("prompt_token_ids", "sampling", "options", "grammar")
#: A ``RequestSpec`` that refers to shared values by their index in ``Submit``.
SequenceFrame: Any = msgspec.defstruct(
    "SequenceFrame",
    [(each.name, int if each.name in _SHARED else each.type) for each in msgspec.structs.fields(RequestSpec)],
)


class Submit(msgspec.Struct, tag="submit"):
    """New sequences. Values that they share are sent only once."""

    prompt_token_ids: list[list[int]]
    sampling: list[SamplingParams]
    options: list[RequestOptions]
    grammar: list[Grammar | None]
    sequences: list[SequenceFrame]

    @classmethod
    def of(cls, specs: Sequence[RequestSpec]) -> Submit:
        """Create the record for ``specs``."""
        shared = {name: {id(getattr(spec, name)): getattr(spec, name) for spec in specs} for name in _SHARED}
        index = {name: {key: at for at, key in enumerate(values)} for name, values in shared.items()}
        sequences = []
        for spec in specs:
            fields = msgspec.structs.asdict(spec)
            fields |= {name: index[name][id(fields[name])] for name in _SHARED}
            sequences.append(SequenceFrame(**fields))
        return cls(**{name: list(values.values()) for name, values in shared.items()}, sequences=sequences)

    def specs(self) -> list[RequestSpec]:
        """Return the sequences. Their lists are shared and must not be modified."""
        specs = []
        for sequence in self.sequences:
            fields = msgspec.structs.asdict(sequence)
            fields |= {name: getattr(self, name)[fields[name]] for name in _SHARED}
            specs.append(RequestSpec(**fields))
        return specs


class GiveVocabulary(msgspec.Struct, tag="vocabulary"):
    """The vocabulary that grammars are compiled for: a ``Vocabulary``, encoded when the tokenizer was loaded."""

    encoded: bytes

    def vocabulary(self) -> Vocabulary:
        return msgspec.msgpack.decode(self.encoded, type=Vocabulary)


class CheckAdapter(msgspec.Struct, tag="check_adapter"):
    """Request to check the LoRA adapter in the folder ``path``, which must be inside ``root`` if that is given.

    number  number that the reply repeats.
    """

    number: int
    name: str
    path: str
    root: str | None


class PrefetchAdapter(msgspec.Struct, tag="prefetch_adapter"):
    """Request to read an adapter before any request names it. The reply is an ``AdapterChecked``."""

    number: int
    adapter: AdapterRef


class Configured(msgspec.Struct, tag="configured"):
    """The arguments are valid. Contains what the HTTP process needs to prepare while the weights load.

    sampling  default sampling parameters from the model's generation_config.json.
    files     identity of the files in the model folder, from ``formats.model_folder.folder_identity``.
    """

    model: str
    tokenizer: TokenizerSource
    dtype: str
    sampling: dict[str, Any]
    files: dict[str, tuple[int, int, int, int]]


class Loading(msgspec.Struct, tag="loading"):
    """A phase of loading has finished."""

    name: str
    seconds: float
    detail: str


class Ready(msgspec.Struct, tag="ready"):
    """The engine accepts requests. ``facts`` are for the start-up table, ``settings`` for the metrics."""

    limits: ModelLimits
    facts: dict[str, str]
    settings: dict[str, str]
    max_num_seqs: int


class Failed(msgspec.Struct, tag="failed"):
    """The error that ends the engine: the id of an entry of the error registry, and its fields."""

    id: str
    fields: dict[str, Any]


class AdapterChecked(msgspec.Struct, tag="adapter_checked"):
    """The reply to ``CheckAdapter`` and ``PrefetchAdapter``: the adapter, or why it cannot be used."""

    number: int
    adapter: AdapterRef | None = None
    failure: Failed | None = None


class Started(msgspec.Struct, tag="started"):
    """The requests that start in the current step."""

    request_ids: list[str]


class Stepped(msgspec.Struct, tag="stepped"):
    """The output of one step."""

    output: StepOutput


ToEngine = Start | Submit | GiveVocabulary | CheckAdapter | PrefetchAdapter | Command
FromEngine = Configured | Loading | Ready | Failed | AdapterChecked | Started | Stepped

_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(record: ToEngine | FromEngine) -> bytes:
    """Return a record as a frame."""
    body = _encoder.encode(record)
    assert len(body) <= MAX_FRAME, f"a frame of {len(body)} bytes"
    return framed(body)


def split(buffer: bytearray) -> list[bytes]:
    """Remove all complete frames from the front of ``buffer``, and return their bodies in order."""
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
    """Return the record for an error. Fields that MessagePack cannot encode become text."""
    return Failed(failure.id, failure.plain_fields)


def decode_error(record: Failed) -> AiakqError:
    """Return the error of a ``Failed`` record."""
    return error(record.id, **record.fields)


def call_on_hangup(sock: socket.socket, callback: Callable[[], None]) -> None:
    """Call ``callback`` in a thread when the other end of ``sock`` is closed, even if its process was killed."""

    def wait() -> None:
        poll = select.poll()
        poll.register(sock, 0)  # hang-up and error are always reported
        poll.poll()
        callback()

    threading.Thread(target=wait, name="hangup", daemon=True).start()


class EngineLink:
    """The engine's end of the socket pair. Sending blocks; receiving blocks on request."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.socket.setblocking(True)
        self._buffer = bytearray()

    def send(self, record: FromEngine) -> None:
        """Send one record. Blocks while the socket's buffer is full."""
        self.socket.sendall(frame(record))

    def receive(self, *, wait: bool) -> list[ToEngine] | None:
        """Return all complete records that have arrived, or None if the peer is gone; ``wait`` blocks for the first."""
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
