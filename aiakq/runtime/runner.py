"""The runner: this step's sequences -> tensors -> model -> logits -> tokens. Holds the KV cache; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.attention import as_bytes, new_cache
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.capture import Capture
from aiakq.runtime.graphs import DecodeGraphs
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.messages import TokenLogprobs
from aiakq.runtime.models.decoder import Model, ModelInput
from aiakq.runtime.program import Bounds, Program, recorded
from aiakq.runtime.sampler import Sampled, prompt_logprobs, sample
from aiakq.runtime.scheduler import Scheduled
from aiakq.runtime.sequence import Sequence
from aiakq.runtime.transfer import on_device


@dataclass
class RunResult:
    """Per scheduled item: the sampled token (None while the prompt is not complete) and prompt log-probabilities."""

    sampled: Sampled | None
    prompt_logprobs: list[TokenLogprobs] | None


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

    def record(self, bounds: Bounds, capture: Capture) -> str:
        """Record the model's steps up to ``bounds``, where that can be done. Returns what came of it in words."""
        self.program = recorded(self.model, self.caches, bounds, self.page_size, capture)
        if isinstance(self.program, str):
            return f"operation by operation ({self.program})"
        if isinstance(self.program, DecodeGraphs):
            return f"decoding in CUDA graphs, {len(self.program)} sizes, captured when needed"
        return f"{len(self.program)} operations in one call"

    @torch.inference_mode()
    def run(self, items: list[Scheduled]) -> list[RunResult]:
        """Run one step. ``items`` with one token come first."""
        step, rows = self._inputs(items)
        program = self.program
        if not isinstance(program, str) and program.takes(step):
            logits = program(step)
        else:
            logits = self.model.forward(step, self.caches)
        results = [
            RunResult(None, self._prompt_logprobs(logits, item, item_rows))
            for item, item_rows in zip(items, rows, strict=True)
        ]
        drawing = [at for at, item in enumerate(items) if item.completes and item.sequence.spec.max_tokens > 0]
        if drawing:
            wanted = [rows[at][-1] for at in drawing]
            # Logits are large: rows that are already one after the other are not copied.
            in_order = wanted == list(range(len(wanted)))
            last = logits[: len(wanted)] if in_order else logits.index_select(0, self._tensor(wanted))
            for at, sampled in zip(drawing, sample(last, [items[at].sequence for at in drawing]), strict=True):
                results[at].sampled = sampled
        return results

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite, before anyone else gets them."""
        for cache in self.caches:
            for tensor in cache:
                as_bytes(tensor)[pages] = 0

    def _inputs(self, items: list[Scheduled]) -> tuple[ModelInput, list[range]]:
        """The step's tensors, and for each item the rows of its logits."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        rows: list[range] = []
        starts = [0]
        lengths = []
        P = self.page_size
        for item in items:
            sequence = item.sequence
            first, end = sequence.num_computed, sequence.num_computed + item.count
            token_ids += sequence.token_ids[first:end]
            positions += range(first, end)
            slots += [sequence.pages[at // P] * P + at % P for at in range(first, end)]
            wanted = _wanted_logits(item)
            rows.append(range(len(logit_rows), len(logit_rows) + len(wanted)))
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
        return (
            ModelInput(self._tensor(token_ids), self._tensor(positions), context, self._tensor(logit_rows)),
            rows,
        )

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return on_device(values, self.device, dtype)

    def _prompt_logprobs(self, logits: Tensor, item: Scheduled, rows: range) -> list[TokenLogprobs] | None:
        """Of the prompt tokens that this step's rows predict; rows that only sample are left out."""
        count = item.sequence.spec.prompt_logprobs
        if count is None:
            return None
        first = item.sequence.num_computed
        targets = item.sequence.token_ids[first + 1 : min(first + item.count + 1, item.sequence.num_prompt)]
        if not targets:
            return []
        return prompt_logprobs(logits[rows.start : rows.start + len(targets)], targets, count)


def sequence_pages(sequence: Sequence, width: int) -> list[int]:
    """The first ``width`` pages of a sequence, padded with the scratch page."""
    pages = sequence.pages[:width]
    return pages + [0] * (width - len(pages))


def _wanted_logits(item: Scheduled) -> range:
    """Positions of this step whose logits are needed: the last if it completes, all for prompt log-probabilities."""
    sequence = item.sequence
    first, end = sequence.num_computed, sequence.num_computed + item.count
    if sequence.wants_prompt_logprobs and first < sequence.num_prompt:
        return range(first, end)
    return range(end - 1, end) if item.completes else range(0)
