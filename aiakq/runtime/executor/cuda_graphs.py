"""Decoding steps on an NVIDIA GPU as CUDA graphs: one launch instead of hundreds.

A graph runs a fixed number of rows, each a token of a sequence with its own page table and length. In a verification,
the draft tokens of a sequence are rows, too: the decode kernel takes each for a sequence of its own over the same pages
(batch expansion). Steps are padded up to the next of a few sizes, each captured when it is first needed; a graph reads
persistent tensors, into which a step copies its inputs. Steps with LoRA adapters have graphs of their own, so that
other steps compute nothing for adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.transfer import on_device
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.config.compilation import CompilationConfig
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import ModelInput, whole_logits

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
        # Shared by all sizes; their graphs share the memory of intermediate results, too.
        self._logits = torch.empty(largest, model.vocab_size, device=device)
        width = model.config.hidden_size
        self._aux_hidden_states = [
            torch.empty(largest, width, dtype=model.ops.dtype, device=device) for _ in model.aux_layers
        ]
        self._made: dict[tuple[int, bool], Callable[[], None]] = {}

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
        )

    def __call__(self, step: ModelInput) -> Tensor:
        """Logits [R, V] float32 of ``step.logit_rows``, as Model.forward; the next step writes over them, and over
        ``step.aux_hidden_states``.
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
        variant = self._model.variant
        replay = self._made.get((size, variant)) or self._make(size, variant)
        replay()
        step.aux_hidden_states += [states[:count] for states in self._aux_hidden_states]
        return self._logits[:count]

    def _make(self, size: int, variant: bool) -> Callable[[], None]:
        rows = self._rows
        context = AttentionContext(
            query_start=rows[: size + 1].to(torch.int32),
            kv_len=self._kv_len[:size],
            slots=self._slots[:size],
            page_table=self._table[:size],
            num_decodes=size,
            query_start_list=list(range(size + 1)),
            kv_len_list=[self._length] * size,
        )
        step = ModelInput(self._token_ids[:size], self._positions[:size], context, rows[:size])
        logits = self._logits[:size]

        def compute() -> None:
            step.aux_hidden_states.clear()
            logits.copy_(whole_logits(self._model.compute(step, self._caches)))
            for kept, states in zip(self._aux_hidden_states, step.aux_hidden_states, strict=True):
                kept[:size] = states

        with self._model.recording():
            replay = self._made[size, variant] = captured(compute, self._pool)
        return replay


def _expanded(step: ModelInput) -> tuple[Tensor, Tensor]:
    """The length [T] int32 of every token's sequence up to it, and the page table [T, pages] of that sequence."""
    context = step.context
    starts = context.query_start_list
    if context.num_decodes == len(context.kv_len_list):
        return context.kv_len, context.page_table
    owners = [
        owner for owner, (start, end) in enumerate(zip(starts, starts[1:], strict=False)) for _ in range(start, end)
    ]
    rows = on_device(owners, context.page_table.device)
    return (step.positions + 1).to(torch.int32), context.page_table.index_select(0, rows)
