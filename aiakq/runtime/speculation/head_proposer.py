"""HeadProposer: proposes chains of draft tokens with a head that reads the hidden states of the target model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aiakq.kernels.ops.sampling import Sampler
from aiakq.kernels.transfer import on_device
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sampler import sample
from aiakq.runtime.executor.sequences import RunningSequences, SequenceState
from aiakq.runtime.models.interface import Model, ModelInput, whole_logits
from aiakq.runtime.protocol.step import Chunk, ChunkResult
from aiakq.runtime.speculation.draft_chain import DraftChain
from aiakq.runtime.speculation.draft_head import DraftHead


class HeadProposer:
    """A ``ModelProposer`` over an EAGLE-3 head or the target's own layer for multi-token prediction.

    The head follows every step, because the hidden states of the target model are gone after it. A draft token is
    sampled with the parameters, random number and grammar of the token that it is for. Position i of the head's cache
    is in the same page as that of the target model; it depends on the token at i + 1, so that the last position of a
    cached prefix may have been computed with another one. This may cost a draft token, and nothing else.

    runner      of the head.
    vocab_size  of the target model.
    max_length  positions that the head can compute; behind them nothing is proposed.
    """

    def __init__(self, runner: Runner, sampler: Sampler, vocab_size: int, max_length: int) -> None:
        assert isinstance(runner.model, DraftHead)
        self.runner, self._head = runner, runner.model
        self._sampler, self._vocab_size, self._max_length = sampler, vocab_size, max_length

    def observe(self, step: ModelInput) -> Tensor:
        """The hidden states of the target model [T, hidden] as the head reads them."""
        return self._head.fuse(step.aux_hidden_states)

    def forget_pages(self) -> None:
        """See ``ModelProposer``: it takes every cached page for its own, and proposes worse where one is not."""

    def propose(
        self,
        chunks: list[Chunk],
        sequences: list[SequenceState],
        results: list[ChunkResult],
        running: RunningSequences,
        observed: Tensor | None,
    ) -> None:
        """See ``ModelProposer``: observed [T, hidden]."""
        assert observed is not None
        parts = []
        row = 0
        for chunk, sequence, result in zip(chunks, sequences, results, strict=True):
            part = Part(chunk, sequence, result, row, self.runner.page_size, self._max_length)
            if part.count > 0:
                parts.append(part)
            row += chunk.count
        if not parts:
            return
        parts.sort(key=lambda part: part.count > 1)
        # A step without logits would not be captured, so that one row of them is always computed.
        chunks = [part.first_chunk(samples=not at) for at, part in enumerate(parts)]
        states, proposing = self._compute(
            parts, chunks, observed, [row for part in parts for row in part.rows], running
        )
        for part in parts:
            part.sequence.num_drafted = part.end
        while proceeding := [(part, row) for part, row in proposing if part.wants_more]:
            parts_left, rows = zip(*proceeding, strict=True)
            chunks = [part.last_chunk() for part in parts_left]
            states, proposing = self._compute(parts_left, chunks, states, rows, running)
        for part in parts:
            part.finish()

    def _compute(
        self,
        parts: Sequence[Part],
        chunks: list[Chunk],
        states: Tensor,
        rows: Sequence[int],
        running: RunningSequences,
    ) -> tuple[Tensor, list[tuple[Part, int]]]:
        """One step of the head, over ``rows`` of hidden states [.., hidden], one for each token. Parts that want one
        get a draft token; returns them, each with its row of the head's own hidden states, and these [R, hidden].
        """
        step = self.runner.prepare(chunks, [part.sequence for part in parts], running)
        tokens = step.model_input.token_ids
        padded = [*rows, *[0] * (len(tokens) - len(rows))]
        rows_of_states = states.index_select(0, on_device(padded, states.device))
        step.model_input.hidden = self._head.stage_input(step.model_input, rows_of_states)
        logits = whole_logits(self.runner.forward(step.model_input))
        [own_states] = step.model_input.aux_hidden_states
        proposing = [(part, found[-1]) for part, found in zip(parts, step.logit_rows, strict=True) if part.num_wanted]
        if proposing:
            wanted = logits.index_select(0, on_device([row for _, row in proposing], logits.device))
            whole = self._head.whole_vocabulary(wanted, self._vocab_size)
            sampler_rows = [part.row() for part, _ in proposing]
            for (part, _), sampled in zip(proposing, sample(self._sampler, whole, sampler_rows).collect(), strict=True):
                part.append(sampled)
        return own_states, proposing


class Part(DraftChain):
    """The draft tokens of one sequence in the making, and what the head computes before the first of them.

    count  positions, up to ``end``.
    rows   of the target model's hidden states there.
    """

    shift = 1

    def __init__(
        self, chunk: Chunk, sequence: SequenceState, result: ChunkResult, row: int, page_size: int, max_length: int
    ) -> None:
        """row: of the first token of ``chunk`` in the step."""
        super().__init__(chunk, sequence, result, min(len(sequence.pages) * page_size, max_length))
        if sequence.num_drafted is None:
            sequence.num_drafted = chunk.first  # before it is a cached prefix
        self._first = sequence.num_drafted
        # The last token has no hidden state yet. One that was missed, for lack of memory, cannot be computed later.
        self.end = min(chunk.first + chunk.count, self._num_known - 1, max_length)
        self.count = self.end - self._first if self._first >= chunk.first else 0
        self.rows = range(row + self._first - chunk.first, row + self.end - chunk.first)
        if self.end != self._num_known - 1:
            self.num_wanted = 0

    def first_chunk(self, samples: bool) -> Chunk:
        """The known tokens; ``samples``: also if no draft token is wanted."""
        return Chunk(self._chunk.slot, self._first, self.count, [], samples or self.num_wanted > 0)


def new_head_proposer(config: EngineConfig, runner: Runner, target: Model, bounds: Bounds) -> HeadProposer:
    """The proposer for the head of ``runner``, which reads the token behind each position."""
    assert config.draft is not None
    runner.shift = 1
    length = min(bounds.length, config.draft.model.num_positions)
    return HeadProposer(runner, target.sampler, target.vocab_size, length)
