"""A step of the model as one list of native operations, recorded when the engine is loaded.

Replay runs no Python, allocates nothing and does not wake up threads between two operations, so that a thread that is
preempted by the system delays the step once, not at every operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.cpu.attention import StepTables
from aiakq.kernels.cpu.recording import Recording, RecordingError
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import ModelInput, StageOutput


@dataclass(frozen=True)
class Bounds:
    """Size of the largest recorded step.

    tokens  maximum number of tokens.
    rows    maximum number of rows of logits.
    length  maximum number of tokens of one sequence in the KV cache.
    """

    tokens: int
    rows: int
    length: int


class Program:
    """The recorded step of one model over one cache."""

    def __init__(self, model: Decoder, caches: list[LayerCache], bounds: Bounds) -> None:
        """Record the step. Raises RecordingError if part of it is computed by torch."""
        # An operation runs over tokens or over rows of logits. Its size m tells which, so the two maxima must differ.
        max_rows = bounds.rows + (bounds.rows == bounds.tokens)
        self.bounds = bounds
        # Kept alive: the recorded operations point to the caches and weights.
        self._model, self._caches = model, caches
        self._tables = StepTables(bounds.length, keep_memory=True)
        token_ids, positions = torch.empty(2, bounds.tokens, dtype=torch.int64)
        logit_rows = torch.empty(max_rows, dtype=torch.int64)
        empty = torch.empty(0, dtype=torch.int32)
        context = AttentionContext(empty, empty, empty, empty, 0, [], [], {"native": self._tables})
        self._hidden: StageOutput | None = None
        if model.takes_hidden:
            both = torch.empty(2, bounds.tokens, model.config.hidden_size, dtype=model.ops.dtype)
            self._hidden = StageOutput(both[0], None if model.stage.is_first else both[1])
        recorded = ModelInput(token_ids, positions, context, logit_rows, self._hidden)
        with Recording() as recording:
            self._output = model.compute(recorded, caches)
        self._aux_hidden_states = recorded.aux_hidden_states  # kept: the recording would reuse their memory
        self._op_list = recording.op_list()
        self._token_ops: list[Any] = recording.with_rows(bounds.tokens)
        self._row_ops: list[Any] = recording.with_rows(max_rows)
        if len(self._token_ops) + len(self._row_ops) < len(recording.ops):
            raise RecordingError("an operation has neither a row per token nor one per row of logits")
        self._input_pointers = [recording.pointers_to(numbers) for numbers in (token_ids, positions, logit_rows)]
        self._tokens, self._rows = bounds.tokens, max_rows

    def __len__(self) -> int:
        """The number of operations."""
        return len(self._op_list.ops)

    def describe(self) -> str:
        """See ``CapturedStep``."""
        return f"{len(self)} operations in one call"

    def accepts(self, step: ModelInput) -> bool:
        """Whether ``step`` is within the bounds."""
        bounds = self.bounds
        return (
            0 < len(step.token_ids) <= bounds.tokens
            and 0 < len(step.logit_rows) <= bounds.rows
            and max(step.context.kv_len_list) <= bounds.length
            and (step.hidden is None or self._model.stage.is_first or step.hidden.residual is not None)
        )

    def __call__(self, step: ModelInput) -> Tensor | StageOutput:
        """Return logits [R, V] float32 or hidden states, as Model.forward does. The next step overwrites them, and
        ``step.aux_hidden_states``.
        """
        tokens, rows = len(step.token_ids), len(step.logit_rows)
        if tokens != self._tokens:
            for op in self._token_ops:
                op.m = tokens
            self._tokens = tokens
        if rows != self._rows:
            for op in self._row_ops:
                op.m = rows
            self._rows = rows
        inputs = (step.token_ids, step.positions, step.logit_rows)
        for numbers, pointers in zip(inputs, self._input_pointers, strict=True):
            for op, field in pointers:
                setattr(op, field, numbers.data_ptr())
        self._tables.fill(step.context)
        self._tables.set_positions(step.positions)
        if self._hidden is not None and step.hidden is not None:
            _copy(step.hidden, _first(self._hidden, tokens))
        self._op_list()
        for states in self._aux_hidden_states:
            step.aux_hidden_states.append(states[: rows if self._model.takes_hidden else tokens])
        return self._output[:rows].float() if isinstance(self._output, Tensor) else _first(self._output, tokens)


def _first(hidden: StageOutput, tokens: int) -> StageOutput:
    """Return a view of the hidden states of the first ``tokens`` tokens."""
    return StageOutput(hidden.x[:tokens], None if hidden.residual is None else hidden.residual[:tokens])


def _copy(hidden: StageOutput, to: StageOutput) -> None:
    to.x.copy_(hidden.x)
    if to.residual is not None:
        assert hidden.residual is not None
        to.residual.copy_(hidden.residual)
