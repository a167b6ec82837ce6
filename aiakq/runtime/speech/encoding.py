"""SpeechEncoding: keys and values of audio by key, and which rows of a step read them. The part of an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from aiakq.errors import one_line
from aiakq.runtime.device_memory import is_out_of_memory
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.layers.cross_attention import EncodedRows, EncoderStates
from aiakq.runtime.protocol.command import DropMedia
from aiakq.runtime.protocol.media import MediaItem
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import MEDIA_FAILED


class AudioSequence(Protocol):
    """What of a sequence of the executor is needed here.

    failure  why nothing it computes counts; None: it does.
    """

    spec: RequestSpec
    failure: str | None


class SpeechEncoding:
    """Audio is encoded, alone, when a step first reads it; the keys and values of all layers are kept. It is a
    ``RowPart`` of an executor.
    """

    def __init__(self, encoder: Callable[[MediaItem], Tensor], states: EncoderStates) -> None:
        self._encoder, self._states = encoder, states
        self._kept: dict[str, list[LayerCache]] = {}

    def __len__(self) -> int:
        """The number of audios in the cache."""
        return len(self._kept)

    def handlers(self) -> Mapping[type, Callable[[Any], object]]:
        """See ``ExecutorPart``."""
        return {DropMedia: self._drop}

    def start(self, sequence: AudioSequence) -> None:
        """See ``ExecutorPart``."""

    def assign(self, sequences: Sequence[AudioSequence], starts: list[int], logit_rows: list[range]) -> None:
        """See ``RowPart``: each row reads the audio of its sequence."""
        read = []
        for index, sequence in enumerate(sequences):
            for item in sequence.spec.media:
                caches = self._encoded(item, sequence)
                if caches is not None:
                    read.append(EncodedRows.of(starts[index], starts[index + 1], caches, item.num_states))
        self._states.rows = read

    def _encoded(self, item: MediaItem, sequence: AudioSequence) -> list[LayerCache] | None:
        """Return the keys and values of an audio; None if it cannot be encoded, and then the sequence fails."""
        found = self._kept.get(item.key)
        if found is None:
            try:
                states = self._encoder(item)
                if len(states) != item.num_states:
                    raise ValueError(f"the encoder returns {len(states)} states, not {item.num_states}")
            except Exception as failure:  # whatever transformers' module raises for tensors that it does not expect
                if is_out_of_memory(failure):
                    raise
                sequence.failure = f"{MEDIA_FAILED[item.kind]}: {one_line(failure).rstrip('.')[:200]}"
                return None
            found = self._kept[item.key] = self._states.keys_values(states)
        return found

    def _drop(self, command: DropMedia) -> None:
        for key in command.keys:
            self._kept.pop(key, None)
