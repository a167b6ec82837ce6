"""MediaEncoding: embeddings of media by key, and the rows of a step that they replace. The part of an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from aiakq.errors import one_line
from aiakq.kernels.transfer import on_device
from aiakq.runtime.device_memory import is_out_of_memory
from aiakq.runtime.models.interface import InputRows
from aiakq.runtime.protocol.command import DropMedia
from aiakq.runtime.protocol.media import MediaItem
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import MEDIA_FAILED, Chunk


class Encoder(Protocol):
    """An encoder of images or audio, with its projection to the width of the language model."""

    def __call__(self, item: MediaItem) -> Tensor:
        """Return the embeddings of one item, and what is added to the outputs of the first L layers at its tokens:
        [1 + L, item.num_embeddings, hidden] in the activation dtype.

        Raises ValueError if they are not as many.
        """

    def zeros(self, count: int) -> Tensor:
        """Return [1 + L, count, hidden] zeros."""


class MediaSequence(Protocol):
    """What of a sequence of the executor is needed here.

    failure  why nothing it computes counts; None: it does.
    """

    spec: RequestSpec
    failure: str | None


class MediaEncoding:
    """Embeddings of media, which are encoded when a step first needs them. It is an ``InputPart`` of an executor.

    Every item is encoded alone, so that its embeddings do not depend on what runs beside it. In a later stage, only
    what is added to outputs of layers is read.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._embeddings: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """The number of items in the cache."""
        return len(self._embeddings)

    def handlers(self) -> Mapping[type, Callable[[Any], object]]:
        """See ``ExecutorPart``."""
        return {DropMedia: self._drop}

    def start(self, sequence: MediaSequence) -> None:
        """See ``ExecutorPart``."""

    def input_rows(
        self, chunks: Sequence[Chunk], sequences: Sequence[MediaSequence], starts: list[int]
    ) -> InputRows | None:
        """See ``InputPart``: the embeddings of all items of which ``chunks`` compute some tokens."""
        rows: list[int] = []
        values: list[Tensor] = []
        for chunk, sequence, start in zip(chunks, sequences, starts, strict=False):
            end = chunk.first + chunk.count
            for item in sequence.spec.media:
                if item.end <= chunk.first or end <= item.first:
                    continue
                done = 0  # embeddings of the item before those of a run
                for first, count in item.places:
                    begin, stop = max(first, chunk.first), min(first + count, end)
                    if begin < stop:
                        rows += range(start + begin - chunk.first, start + stop - chunk.first)
                        values.append(self._encoded(item, sequence)[:, done + begin - first : done + stop - first])
                    done += count
        if not rows:
            return None
        replaced, *added = torch.cat(values, dim=1)
        return InputRows(on_device(rows, replaced.device), replaced, added)

    def _encoded(self, item: MediaItem, sequence: MediaSequence) -> Tensor:
        """Return the embeddings of an item; if it cannot be encoded, the sequence fails and they are zeros."""
        found = self._embeddings.get(item.key)
        if found is None:
            try:
                found = self._encoder(item)
            except Exception as failure:  # whatever transformers' module raises for tensors that it does not expect
                if is_out_of_memory(failure):
                    raise
                sequence.failure = f"{MEDIA_FAILED[item.kind]}: {one_line(failure).rstrip('.')[:200]}"
                return self._encoder.zeros(item.num_embeddings)
            self._embeddings[item.key] = found
        return found

    def _drop(self, command: DropMedia) -> None:
        for key in command.keys:
            self._embeddings.pop(key, None)
