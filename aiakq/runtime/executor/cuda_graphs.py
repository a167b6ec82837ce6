"""Decoding steps on an NVIDIA GPU as CUDA graphs: one launch instead of hundreds.

A graph runs a fixed number of rows, each a token of a sequence with its own page table and length. In a verification,
the draft tokens of a sequence are rows, too: the decode kernel takes each for a sequence of its own over the same pages
(batch expansion). Steps are padded up to the next of a few sizes, each captured when it is first needed; a graph reads
persistent tensors, into which a step copies its inputs, also the hidden states of the previous pipeline stage. Steps
with LoRA adapters have graphs of their own, so that other steps compute nothing for adapters. A model with recurrent
layers has no graphs for verifications: the draft tokens of a sequence are computed one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.recurrent_types import DecodeStates, StateContext, states_of
from aiakq.kernels.transfer import on_device
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.config.compilation import CompilationConfig
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import ModelInput, StageOutput

_DEFAULT = CompilationConfig()


def sizes(rows: int, compilation: CompilationConfig = _DEFAULT) -> list[int]:
    """Numbers of rows that graphs are made for, ``rows`` at most: 1, 2, 4, multiples of 8 up to 64, then of 32."""
    largest = min(rows, compilation.max_cudagraph_capture_size or rows)
    if (chosen := compilation.cudagraph_capture_sizes) is not None:
        return [size for size in chosen if size <= largest] or [min(largest, chosen[0])]
    regular = [1, 2, 4, *range(8, 65, 8), *range(96, largest + 32, 32)]
    return [size for size in regular if size < largest] + [largest]


def captured(compute: Callable[[], object], pool: Any) -> Callable[[], None]:
    """``compute`` as a graph: a function that runs it again, without a result."""
    # Run once outside a graph: compiling kernels and initializing libraries cannot be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Threads that watch for late ranks go on looking at events.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        compute()
    return graph.replay


@dataclass
class _Graph:
    """A captured graph, and where its result is: logits [R, V], or hidden states."""

    replay: Callable[[], None]
    output: list[Tensor | StageOutput]


class DecodeGraphs:
    """The decoding steps of one model over one cache.

    Rows beyond a step's tokens are padding: tokens that write to the scratch page.
    """

    def __init__(
        self,
        model: Decoder,
        caches: list[LayerCache],
        sizes: list[int],
        length: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        """For ``sizes`` rows, ascending, of sequences of up to ``length`` tokens."""
        self._model, self._caches = model, caches
        self._sizes, self._length = sizes, length
        largest = sizes[-1]
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids, self._positions, self._slots = zeros(3, largest).unbind()
        self._kv_len = zeros(largest, dtype=torch.int32) + 1
        self._table = zeros(largest, -(-length // page_size), dtype=torch.int32)
        self._rows = torch.arange(largest + 1, device=device)
        self._starts = self._rows.to(torch.int32)
        # Shared by all sizes; their graphs share the memory of intermediate results, too.
        self._logits = torch.empty(largest if model.stage.is_last else 0, model.vocab_size, device=device)
        self._hidden: StageOutput | None = None
        width = model.config.hidden_size
        self._aux_hidden_states = [
            torch.empty(largest, width, dtype=model.ops.dtype, device=device) for _ in model.aux_layers
        ]
        rows = [len(states) for cache in caches for states in states_of(cache)]
        self._states = DecodeStates(largest, rows[0] - 1, device) if rows else None
        self._made: dict[tuple[int, bool], _Graph] = {}

    def __len__(self) -> int:
        """The number of sizes."""
        return len(self._sizes)

    @property
    def captured_sizes(self) -> set[int]:
        """The numbers of rows that a graph was captured for."""
        return {size for size, _ in self._made}

    def describe(self) -> str:
        """See ``CapturedStep``."""
        return f"decoding in CUDA graphs, {len(self)} sizes, captured when needed"

    def accepts(self, step: ModelInput) -> bool:
        """Whether ``step`` is decoding: the logits of every token are needed, within the bounds."""
        count: int = step.context.query_start_list[-1]
        return (
            count == len(step.token_ids) == len(step.logit_rows)
            and count <= self._sizes[-1]
            and max(step.context.kv_len_list) <= self._length
            and (self._states is None or step.context.num_decodes == count)
        )

    def __call__(self, step: ModelInput) -> Tensor | StageOutput:
        """Logits [R, V] float32 of ``step.logit_rows`` or hidden states, as Model.forward; the next step writes over
        them, and over ``step.aux_hidden_states``.
        """
        context, count = step.context, len(step.token_ids)
        size = next(size for size in self._sizes if size >= count)
        width = context.page_table.shape[1]
        kv_len, page_table = _expanded(step)
        for kept, new, padding in (
            (self._token_ids, step.token_ids, 0),
            (self._positions, step.positions, 0),
            (self._slots, context.slots, 0),
            (self._kv_len, kv_len, 1),
        ):
            kept[:count] = new
            kept[count:size] = padding
        self._table[:count, :width] = page_table
        self._table[count:size, :1] = 0
        if self._states is not None:
            assert isinstance(context.states, StateContext)
            self._states.fill(context.states, size)
        if step.hidden is not None and self._hidden is None:
            self._hidden = _of_rows(step.hidden, lambda each: each.new_zeros(self._sizes[-1], each.shape[1]))
        variant = self._model.variant
        graph = self._made.get((size, variant)) or self._make(size, variant)
        # After the capture, which computes with these tensors and modifies them.
        self._take_hidden(step, count, size)
        graph.replay()
        step.aux_hidden_states += [states[:count] for states in self._aux_hidden_states]
        output = graph.output[0]
        return output[:count] if isinstance(output, Tensor) else _of_rows(output, lambda each: each[:count])

    def _take_hidden(self, step: ModelInput, count: int, size: int) -> None:
        """Copy what the previous stage has sent; padding is zero."""
        if step.hidden is None:
            return
        assert self._hidden is not None
        for kept, new in ((self._hidden.x, step.hidden.x), (self._hidden.residual, step.hidden.residual)):
            if kept is not None and new is not None:
                kept[:count] = new
                kept[count:size] = 0

    def _make(self, size: int, variant: bool) -> _Graph:
        rows = self._rows
        context = AttentionContext(
            query_start=self._starts[: size + 1],
            kv_len=self._kv_len[:size],
            slots=self._slots[:size],
            page_table=self._table[:size],
            num_decodes=size,
            query_start_list=list(range(size + 1)),
            kv_len_list=[self._length] * size,
            states=None if self._states is None else self._states.tables(size),
        )
        hidden = None if self._hidden is None else _of_rows(self._hidden, lambda each: each[:size])
        step = ModelInput(self._token_ids[:size], self._positions[:size], context, rows[:size], hidden)
        logits = self._logits[:size]
        found: list[Tensor | StageOutput] = []

        def compute() -> None:
            # What layers share is computed by the graph, from the inputs of its step.
            context.plans.clear()
            step.aux_hidden_states.clear()
            output = self._model.compute(step, self._caches)
            found[:] = [logits.copy_(output) if isinstance(output, Tensor) else output]
            for kept, states in zip(self._aux_hidden_states, step.aux_hidden_states, strict=True):
                kept[:size] = states

        with self._model.recording():
            graph = self._made[size, variant] = _Graph(captured(compute, self._pool), found)
        return graph


def _of_rows(hidden: StageOutput, of: Callable[[Tensor], Tensor]) -> StageOutput:
    """Apply ``of`` to both tensors."""
    return StageOutput(of(hidden.x), None if hidden.residual is None else of(hidden.residual))


def _expanded(step: ModelInput) -> tuple[Tensor, Tensor]:
    """The length [T] int32 of every token's sequence up to it, and the page table [T, pages] of that sequence."""
    context = step.context
    starts = context.query_start_list
    if context.num_decodes == len(context.kv_len_list):
        return context.kv_len, context.page_table
    owners: list[int] = []
    lengths: list[int] = []
    for owner, (start, end, length) in enumerate(zip(starts, starts[1:], context.kv_len_list, strict=False)):
        owners += [owner] * (end - start)
        lengths += range(length - (end - start) + 1, length + 1)
    rows, kv_len = on_device(owners + lengths, context.page_table.device).chunk(2)
    return kv_len.to(torch.int32), context.page_table.index_select(0, rows)
