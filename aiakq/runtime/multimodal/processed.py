"""Processed: what is computed of an image, video or audio before its encoder. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiakq.runtime.protocol.media import TensorRecord

#: NumPy's names of dtypes -> those that ``TensorRecord`` has.
_DTYPES = {"float32": "float32", "float64": "float32", "int64": "int64", "int32": "int64", "bool": "bool"}


@dataclass(frozen=True)
class Processed:
    """One item, preprocessed.

    tensors  arguments of the encoder by name.
    text     what takes the place of its placeholder, with a token for each embedding; "" for nothing but ``count`` of
             these tokens.
    grid     see ``MediaItem``.
    times    see ``MediaItem``.
    """

    tensors: dict[str, TensorRecord]
    text: str = ""
    count: int = 0
    grid: tuple[int, int] | None = None
    times: list[int] = field(default_factory=list)

    @property
    def hashed(self) -> Mapping[str, TensorRecord]:
        """What its embeddings and its positions depend on."""
        return {**self.tensors, "times": record(np.array(self.times))} if self.times else self.tensors


def record(array: Any) -> TensorRecord:
    """Return an array of NumPy as a ``TensorRecord``."""
    found = np.asarray(array)
    dtype = _DTYPES[found.dtype.name]
    converted = np.ascontiguousarray(found.astype(dtype, copy=False))
    return TensorRecord(dtype, list(converted.shape), converted.tobytes())
