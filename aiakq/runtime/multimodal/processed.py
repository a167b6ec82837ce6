"""Processed: an image or a video as its processor returns it, before it has a place in a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiakq.runtime.protocol.media import MediaItem, MediaKind, TensorRecord, media_key

#: NumPy's names of dtypes -> those that ``TensorRecord`` has.
_DTYPES = {"float32": "float32", "float64": "float32", "int64": "int64", "int32": "int64", "bool": "bool"}


@dataclass(frozen=True)
class Processed:
    """The text that takes the place of the placeholder, and what ``MediaItem`` has of it.

    token_id      the token in its text that stands for an embedding.
    begins_alone  whether its text would be tokenized together with text before it.
    """

    kind: MediaKind
    text: str
    token_id: int
    tensors: Mapping[str, TensorRecord]
    grid: tuple[int, int] | None = None
    is_whole: bool = False
    times: list[int] = field(default_factory=list)
    begins_alone: bool = False

    def item(self, ids: list[int], start: int) -> MediaItem:
        """Return the item whose tokens ``ids`` are at ``start`` of the prompt.

        Its key has all that the positions are computed from.
        """
        places: list[tuple[int, int]] = []
        for number, token in enumerate(ids, start):
            if token != self.token_id:
                continue
            if places and sum(places[-1]) == number:
                places[-1] = (places[-1][0], places[-1][1] + 1)
            else:
                places.append((number, 1))
        hashed = {**self.tensors, "times": record(np.array(self.times))} if self.times else self.tensors
        key, tensors = media_key(self.kind, hashed), dict(self.tensors)
        return MediaItem(self.kind, key, places, tensors, self.grid, self.is_whole, times=self.times)


def record(array: Any) -> TensorRecord:
    """Return an array of NumPy as a ``TensorRecord``."""
    found = np.asarray(array)
    dtype = _DTYPES[found.dtype.name]
    converted = np.ascontiguousarray(found.astype(dtype, copy=False))
    return TensorRecord(dtype, list(converted.shape), converted.tobytes())
