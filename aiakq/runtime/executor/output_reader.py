"""OutputReader: what the executor returns for a sequence besides the tokens that it samples.

A sequence without a reader is only sampled. Otherwise, the reader says which positions of the prompt are needed, and
fills in the results of its chunks: log-probabilities here, pooled prompts in ``runtime.pooling``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from aiakq.kernels.ops.sampling import Sampler, SampleRow, TopTokens
from aiakq.kernels.transfer import copies_on_host
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import Chunk, ChunkResult, TokenLogprobs

#: Fills in the result of a chunk, once its step has run.
FillResult = Callable[[ChunkResult], None]


class ModelOutput:
    """The output of the model for a step: ``rows`` [R, V] of logits, or [R, D] of hidden states or scores."""

    def __init__(self, rows: Tensor, sampler: Sampler) -> None:
        self.rows, self.sampler = rows, sampler
        self._on_host: Callable[[], list[Tensor]] | None = None

    def on_host(self) -> Callable[[], Tensor]:
        """Launch a copy to the host, one for all readers; the function returned waits for the rows [R, D]."""
        copy = self._on_host
        if copy is None:
            # The next step writes over them.
            copy = copies_on_host(self.rows.clone() if self.rows.device.type == "cpu" else self.rows)
            self._on_host = copy
        return lambda: copy()[0]


class OutputReader(Protocol):
    """Reads the model's output for one sequence."""

    def positions(self, chunk: Chunk) -> Sequence[int]:
        """Return the positions of a chunk whose outputs are needed."""

    def read(self, chunk: Chunk, output: ModelOutput, rows: range) -> FillResult | None:
        """Launch what reads ``rows`` of ``output``, which belong to ``chunk``; None if nothing does."""


def sampled_positions(chunk: Chunk) -> range:
    """Return the positions whose logits are sampled: those before and of draft tokens, if the chunk is sampled."""
    end = chunk.first + chunk.count
    return range(max(chunk.first, end - 1 - len(chunk.drafts)), end) if chunk.samples else range(0)


class PromptLogprobsReader:
    """Reads log-probabilities of the tokens of a prompt."""

    def __init__(self, prompt_token_ids: list[int], count: int) -> None:
        self._prompt, self._count = prompt_token_ids, count

    def positions(self, chunk: Chunk) -> Sequence[int]:
        """See OutputReader."""
        if chunk.first < len(self._prompt):
            return range(chunk.first, chunk.first + chunk.count)
        return sampled_positions(chunk)

    def read(self, chunk: Chunk, output: ModelOutput, rows: range) -> FillResult | None:
        """See OutputReader."""
        if chunk.first >= len(self._prompt):
            return None
        targets = self._prompt[chunk.first + 1 : chunk.first + chunk.count + 1]
        logits = output.rows[rows.start : rows.start + len(targets)]
        collect = prompt_logprobs(output.sampler, logits, targets, self._count) if targets else list

        def fill(result: ChunkResult) -> None:
            result.prompt_logprobs = collect()

        return fill


def prompt_logprobs(
    sampler: Sampler, logits: Tensor, targets: list[int], count: int
) -> Callable[[], list[TokenLogprobs]]:
    """Log-probabilities of prompt tokens: row i of ``logits`` [R, V] float32, which may change after the call, predicts
    ``targets[i]``. The function returned waits for them.
    """
    count = logits.shape[1] if count == -1 else count
    pending = sampler(logits, [SampleRow(token=target, num_logprobs=count) for target in targets])

    def collect() -> list[TokenLogprobs]:
        results = pending.collect()
        found = []
        for row, (token, logprob) in enumerate(zip(targets, results.logprobs, strict=True)):
            top = results.top.get(row, TopTokens([], []))
            found.append(TokenLogprobs([token, *top.ids], [logprob, *top.logprobs], results.ranks[row]))
        return found

    return collect


def new_logprobs_reader(spec: RequestSpec) -> OutputReader | None:
    """Return the reader of a sequence that generates text."""
    count = spec.sampling.prompt_logprobs
    return None if count is None else PromptLogprobsReader(spec.prompt_token_ids, count)
