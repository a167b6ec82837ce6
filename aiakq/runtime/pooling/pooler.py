"""PromptPooler: pools the outputs of the model for one prompt, which arrive chunk by chunk.

Pooling runs on the host, per prompt and in token order, so that the result does not depend on batching, chunking or
preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aiakq.runtime.executor.output_reader import FillResult, ModelOutput
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.pooling_params import REDUCTIONS, Pooled, Pooling
from aiakq.runtime.protocol.step import NOT_FINITE, Chunk, ChunkResult

#: Pooled rows [R, K] float32 on the host -> [R, N]: Dense modules, or the head of an encoder.
Projected = Callable[[Tensor], Tensor]


class PoolingPart:
    """The ``ExecutorPart`` that gives sequences their poolers; ``projection`` is that of all."""

    def __init__(self, projection: Projected | None) -> None:
        self._projection = projection

    def handlers(self) -> Mapping[type, Callable[[Any], Any]]:
        """See ``ExecutorPart``: none."""
        return {}

    def start(self, sequence: SequenceState) -> None:
        """See ``ExecutorPart``."""
        pooling = sequence.spec.options.pooling
        if pooling is not None:
            sequence.reader = PromptPooler(pooling, self._projection, sequence.spec.prompt_token_ids)


class PromptPooler:
    """Pools the prompt ``token_ids``, as an OutputReader. ``projection`` is applied to the pooled rows before
    normalization.
    """

    def __init__(self, pooling: Pooling, projection: Projected | None, token_ids: Sequence[int] = ()) -> None:
        self._pooling, self._projection, self._token_ids = pooling, projection, token_ids
        self._rows: list[Tensor] = []
        self._sum: np.typing.NDArray[np.float64] | None = None  # or the largest values
        self._count = 0
        self._end: int | None = None

    def positions(self, chunk: Chunk) -> Sequence[int]:
        """See OutputReader."""
        prompt = self._token_ids
        return self._pooling.positions(prompt, chunk.first, chunk.first + chunk.count, len(prompt))

    def read(self, chunk: Chunk, output: ModelOutput, rows: range) -> FillResult:
        """See OutputReader. The result is that of the last chunk of the prompt."""
        on_host, width = output.on_host(), output.rows.shape[1]

        def fill(result: ChunkResult) -> None:
            self.add(on_host()[rows.start : rows.stop], chunk.first, chunk.count)
            if chunk.first + chunk.count == len(self._token_ids):
                result.pooled, result.error = self.result(width)

        return fill

    def add(self, rows: Tensor, first: int, count: int) -> None:
        """Add the next chunk of the prompt, ``count`` tokens from position ``first`` on.

        rows  the outputs of the chunk that pooling needs, [R, D] float32 on the host; kept without a copy.
        """
        assert self._end in (None, first), f"a chunk from {first} on follows one up to {self._end}"
        self._end = first + count
        if not len(rows):
            return
        kind = self._pooling.kind
        if kind not in REDUCTIONS:
            self._rows.append(rows)
            return
        numbers = rows.numpy()
        if self._sum is None:
            self._sum = np.full(numbers.shape[1], -np.inf) if kind == "MAX" else np.zeros(numbers.shape[1])
        # Row by row, so that rounding does not depend on chunk boundaries.
        for row in numbers:
            self._count += 1
            if kind == "MAX":
                np.maximum(self._sum, row, out=self._sum)
            else:
                self._sum += self._count * row.astype(np.float64) if kind == "WEIGHTEDMEAN" else row

    def result(self, width: int) -> tuple[Pooled | None, str | None]:
        """Return the pooled result after the whole prompt, or None and the reason of failure.

        width  D, for a prompt without rows.
        """
        rows = self._pooled() if self._rows or self._sum is not None else torch.zeros(0, width)
        if self._projection is not None:
            rows = self._projection(rows)
        pooling = self._pooling
        if pooling.dimensions is not None:
            rows = rows[:, : pooling.dimensions]
        if pooling.normalize:
            rows = torch.nn.functional.normalize(rows, dim=-1)
        if pooling.activation == "softmax":
            rows = rows.softmax(-1)
        elif pooling.activation == "sigmoid":
            rows = rows.sigmoid()
        if not bool(rows.isfinite().all()):
            return None, NOT_FINITE
        return Pooled(rows.contiguous().numpy().tobytes(), rows.shape[1]), None

    def _pooled(self) -> Tensor:
        if self._sum is None:
            return torch.cat(self._rows)
        count = self._count
        divisors = {"MAX": 1, "MEAN": count, "WEIGHTEDMEAN": count * (count + 1) // 2, "MEAN_SQRT_LEN": count**0.5}
        return torch.from_numpy((self._sum / divisors[self._pooling.kind]).astype(np.float32))[None]
