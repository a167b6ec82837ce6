"""A model's step as one list of native operations, recorded when the engine is put together.

Between two operations there is then no Python, no memory to ask for, and no thread to wake: a thread that the system
does not let run for a moment is waited for once per step, not once per operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.attention import StepTables
from aiakq.kernels.cpu.recording import Recording, RecordingError
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.config.compilation import CompilationConfig
from aiakq.runtime.executor.cuda_graphs import DecodeGraphs, sizes
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.decoder import Decoder, Model, ModelInput


@dataclass(frozen=True)
class Bounds:
    """The largest step that is recorded: tokens, rows of logits, and tokens of one sequence in the cache."""

    tokens: int
    rows: int
    length: int


class Program:
    """The recorded step of one model over one cache."""

    def __init__(self, model: Decoder, caches: list[LayerCache], bounds: Bounds) -> None:
        """Raises RecordingError where torch has to compute something."""
        # Tokens and rows of logits are told apart by their number.
        most_rows = bounds.rows + (bounds.rows == bounds.tokens)
        self.bounds = bounds
        # They are in use as long as the recorded operations, which point to the caches and weights.
        self._model, self._caches = model, caches
        self._tables = StepTables(bounds.length, keep_memory=True)
        token_ids, positions = torch.empty(2, bounds.tokens, dtype=torch.int64)
        logit_rows = torch.empty(most_rows, dtype=torch.int64)
        nothing = torch.empty(0, dtype=torch.int32)
        context = AttentionContext(nothing, nothing, nothing, nothing, 0, [], [], {"native": self._tables})
        with Recording() as recording:
            self._logits = model.compute(ModelInput(token_ids, positions, context, logit_rows), caches)
        self._op_list = recording.op_list()
        ops: list[Any] = recording.ops
        self._token_ops = [op for op in ops if op.m == bounds.tokens]
        self._row_ops = [op for op in ops if op.m == most_rows]
        assert len(self._token_ops) + len(self._row_ops) == len(ops)
        embedding = library.load_library().kinds["embedding"]
        looking_up = [op for op in ops if op.kind == embedding]
        self._readers = [
            [op for op in looking_up if op.ids == numbers.data_ptr()] for numbers in (token_ids, positions, logit_rows)
        ]
        assert sum(map(len, self._readers)) == len(looking_up)
        self._tokens, self._rows = bounds.tokens, most_rows

    def __len__(self) -> int:
        """The number of operations."""
        return len(self._op_list.ops)

    def takes(self, step: ModelInput) -> bool:
        """Whether ``step`` is within the bounds."""
        bounds = self.bounds
        return (
            0 < len(step.token_ids) <= bounds.tokens
            and 0 < len(step.logit_rows) <= bounds.rows
            and max(step.context.kv_len_list) <= bounds.length
        )

    def __call__(self, step: ModelInput) -> Tensor:
        """Logits [R, V] float32 of ``step.logit_rows``, as Model.forward; the next step writes over them."""
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
        for numbers, readers in zip(inputs, self._readers, strict=True):
            for op in readers:
                op.ids = numbers.data_ptr()
        self._tables.fill(step.context)
        self._tables.turn(step.positions)
        self._op_list()
        return self._logits[:rows].float()


def recorded(
    model: Model, caches: list[LayerCache], bounds: Bounds, page_size: int, compilation: CompilationConfig
) -> Program | DecodeGraphs | str:
    """The step of ``model`` recorded, or why it cannot be: all of it on a CPU, decoding on a GPU."""
    if not isinstance(model, Decoder):
        return "the model is transformers'"
    device = caches[0][0].device
    if device.type == "cuda":
        if any(isinstance(block.mlp, SparseMLP) for block in model.blocks):
            return "experts are chosen on the host"
        if triton.trouble() is not None or model.embedding.dtype not in triton.DTYPES:
            return "attention is torch's"
        length = min(bounds.length, compilation.max_seq_len_to_capture or bounds.length)
        return DecodeGraphs(model, caches, sizes(bounds.rows, compilation), length, page_size, device)
    if library.unavailable() is not None:
        return "no native library"
    try:
        with torch.inference_mode():
            return Program(model, caches, bounds)
    except RecordingError as problem:
        return str(problem)
