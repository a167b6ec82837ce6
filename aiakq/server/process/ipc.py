"""Messages between the HTTP process and the engine process, the records of a channel (system/channel.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from aiakq.arguments.engine import EngineArguments
from aiakq.runtime.config.multimodal import MultimodalConfig
from aiakq.runtime.config.speech import SpeechConfig
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.command import Command
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.media import MediaItem
from aiakq.runtime.protocol.output import StepOutput
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.text.tokenizer_source import TokenizerSource
from aiakq.system.channel import Channel, Failure


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
_SHARED = ("prompt_token_ids", "sampling", "options", "grammar", "media")
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
    media: list[tuple[MediaItem, ...]]
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
    media     how it reads images or audio; None if it reads text only.
    speech    how it transcribes audio; None if it does not.
    """

    model: str
    tokenizer: TokenizerSource
    dtype: str
    sampling: dict[str, Any]
    files: dict[str, tuple[int, int, int, int]]
    media: MultimodalConfig | None = None
    speech: SpeechConfig | None = None


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


class AdapterChecked(msgspec.Struct, tag="adapter_checked"):
    """The reply to ``CheckAdapter`` and ``PrefetchAdapter``: the adapter, or why it cannot be used."""

    number: int
    adapter: AdapterRef | None = None
    failure: Failure | None = None


class Started(msgspec.Struct, tag="started"):
    """The requests that start in the current step."""

    request_ids: list[str]


class Stepped(msgspec.Struct, tag="stepped"):
    """The output of one step."""

    output: StepOutput


ToEngine = Start | Submit | GiveVocabulary | CheckAdapter | PrefetchAdapter | Command
FromEngine = Configured | Loading | Ready | AdapterChecked | Started | Stepped

#: The engine's end of the channel.
EngineChannel = Channel[FromEngine, ToEngine]
