"""The runner: this step's sequences -> tensors -> model -> logits -> tokens. Holds the KV cache; decides nothing.

Two steps may be on their way to the device at a time: sampled tokens stay there as inputs of the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.ops.attention import as_bytes, new_cache
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.config.compilation import CompilationConfig
from aiakq.runtime.device_memory import release_memory
from aiakq.runtime.engine.messages import TokenLogprobs
from aiakq.runtime.engine.sequence import Scheduled, Sequence
from aiakq.runtime.executor.cpu_program import Bounds, Program, recorded
from aiakq.runtime.executor.cuda_graphs import DecodeGraphs
from aiakq.runtime.executor.sampler import Choice, Sampled, choose, prompt_logprobs
from aiakq.runtime.executor.transfer import on_device
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.models.decoder import Model, ModelInput


@dataclass
class RunResult:
    """Per scheduled item: the sampled token (None while the prompt is not complete) and prompt log-probabilities."""

    sampled: Sampled | None
    prompt_logprobs: list[TokenLogprobs] | None


class Flight:
    """A step that was launched: its logits, later its tokens.

    items  what to give results of: those that were sampled.
    """

    def __init__(self, runner: Runner, logits: Tensor, rows: dict[Scheduled, range]) -> None:
        self.items: list[Scheduled] = []
        self._runner = runner
        self._logits, self._rows = logits, rows
        self._choice: Choice | None = None
        self._drawing: list[Scheduled] = []
        self._scores: dict[Scheduled, Callable[[], list[TokenLogprobs]]] = {}

    @torch.inference_mode()
    def sample(self, items: list[Scheduled]) -> bool:
        """Launch what chooses the next tokens of ``items``, some of the step's in their order, whose sequences must
        know all tokens before. Comes before the next launch. Returns True.
        """
        self.items = items
        logits, rows = self._logits, self._rows
        for item in items:
            scores = _prompt_scores(logits, item, rows[item])
            if scores is not None:
                self._scores[item] = scores
        self._drawing = [item for item in items if item.draws]
        if self._drawing:
            wanted = [rows[item][-1] for item in self._drawing]
            # Logits are large: rows that are already one after the other are not copied.
            in_order = wanted == list(range(len(wanted)))
            last = logits[: len(wanted)] if in_order else logits.index_select(0, on_device(wanted, logits.device))
            self._choice = choose(last, [item.sequence for item in self._drawing])
            self._runner.keep(self._choice.tokens, [item.sequence for item in self._drawing])
        return True

    def results(self) -> list[RunResult]:
        """Of each of ``items``. This waits for the device to have done all up to here."""
        sampled = self._choice.results() if self._choice is not None else []
        tokens = dict(zip(self._drawing, sampled, strict=True))
        return [
            RunResult(tokens.get(item), self._scores[item]() if item in self._scores else None) for item in self.items
        ]


class Runner:
    """A model, its KV cache (in ``dtype``), and the tensors of one step."""

    def __init__(self, model: Model, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        layers, kv_heads, head_dim = model.kv_shape
        self.model = model
        self.page_size = page_size
        self.device = device
        self.caches: list[LayerCache] = [
            new_cache(num_pages, page_size, kv_heads, head_dim, dtype, device) for _ in range(layers)
        ]
        self.program: Program | DecodeGraphs | str = "not asked for"
        self._sampled = torch.empty(0, dtype=torch.int64, device=device)
        self._row_of: dict[Sequence, int] = {}

    def record(self, bounds: Bounds, compilation: CompilationConfig) -> str:
        """Record the model's steps up to ``bounds``, where that can be done. Returns what came of it in words."""
        self.program = recorded(self.model, self.caches, bounds, self.page_size, compilation)
        if isinstance(self.program, str):
            return f"operation by operation ({self.program})"
        if isinstance(self.program, DecodeGraphs):
            return f"decoding in CUDA graphs, {len(self.program)} sizes, captured when needed"
        return f"{len(self.program)} operations in one call"

    @torch.inference_mode()
    def launch(self, items: list[Scheduled]) -> Flight:
        """Run the model over one step, behind what was launched before. ``items`` with one token come first.

        A token that a sequence does not know yet is taken from what was sampled last.
        """
        step, rows = self._inputs(items)
        program = self.program
        if not isinstance(program, str) and program.takes(step):
            logits = program(step)
        else:
            logits = self.model.forward(step, self.caches)
        return Flight(self, logits, rows)

    def keep(self, tokens: Tensor, sequences: list[Sequence]) -> None:
        """Remember ``tokens`` [R] of ``sequences`` as the last sampled."""
        self._sampled = tokens
        self._row_of = {sequence: row for row, sequence in enumerate(sequences)}

    def release_memory(self) -> None:
        """Return memory that is not used any more, before a smaller step is tried."""
        release_memory()

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite, before anyone else gets them."""
        for cache in self.caches:
            for tensor in cache:
                as_bytes(tensor)[pages] = 0

    def _inputs(self, items: list[Scheduled]) -> tuple[ModelInput, dict[Scheduled, range]]:
        """The step's tensors, and for each item the rows of its logits."""
        token_ids: list[int] = []
        coming: list[tuple[int, int]] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        rows: dict[Scheduled, range] = {}
        starts = [0]
        lengths = []
        P = self.page_size
        for item in items:
            sequence = item.sequence
            first, end = item.first, item.end
            token_ids += sequence.token_ids[first:end]
            if end > len(sequence.token_ids):
                coming.append((len(token_ids), self._row_of[sequence]))
                token_ids.append(0)
            positions += range(first, end)
            slots += [sequence.pages[at // P] * P + at % P for at in range(first, end)]
            wanted = _wanted_logits(item)
            rows[item] = range(len(logit_rows), len(logit_rows) + len(wanted))
            logit_rows += [starts[-1] + at - first for at in wanted]
            starts.append(starts[-1] + item.count)
            lengths.append(end)
        padding = -len(token_ids) % self.model.row_multiple
        for column in (token_ids, positions, slots):
            column += [0] * padding
        logit_rows += [0] * (-len(logit_rows) % self.model.row_multiple)
        width = max(-(-length // P) for length in lengths)
        table = [sequence_pages(item.sequence, width) for item in items]
        context = AttentionContext(
            query_start=self._tensor(starts, torch.int32),
            kv_len=self._tensor(lengths, torch.int32),
            slots=self._tensor(slots),
            page_table=self._tensor(table, torch.int32),
            num_decodes=sum(item.count == 1 for item in items),
            query_start_list=starts,
            kv_len_list=lengths,
        )
        ids = self._tensor(token_ids)
        if coming:
            places, sampled = self._tensor(coming).unbind(1)
            ids.index_copy_(0, places, self._sampled.index_select(0, sampled))
        return ModelInput(ids, self._tensor(positions), context, self._tensor(logit_rows)), rows

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return on_device(values, self.device, dtype)


def _prompt_scores(logits: Tensor, item: Scheduled, rows: range) -> Callable[[], list[TokenLogprobs]] | None:
    """Log-probabilities of the prompt tokens that this step's rows predict; rows that only sample are left out."""
    count = item.sequence.spec.prompt_logprobs
    if count is None:
        return None
    targets = item.sequence.token_ids[item.first + 1 : min(item.end + 1, item.sequence.num_prompt)]
    if not targets:
        return list
    return prompt_logprobs(logits[rows.start : rows.start + len(targets)], targets, count)


def sequence_pages(sequence: Sequence, width: int) -> list[int]:
    """The first ``width`` pages of a sequence, padded with the scratch page."""
    pages = sequence.pages[:width]
    return pages + [0] * (width - len(pages))


def _wanted_logits(item: Scheduled) -> range:
    """Positions of this step whose logits are needed: the last if it completes, all for prompt log-probabilities."""
    if item.sequence.wants_prompt_logprobs and item.first < item.sequence.num_prompt:
        return range(item.first, item.end)
    return range(item.end - 1, item.end) if item.completes else range(0)
