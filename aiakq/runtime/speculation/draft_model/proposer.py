"""DraftModel: proposes draft tokens with a second, faster model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from torch import Tensor

from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sampler import sample
from aiakq.runtime.executor.sequences import RunningSequences, SequenceState
from aiakq.runtime.executor.states import StateRows
from aiakq.runtime.models.interface import ModelInput, whole_logits
from aiakq.runtime.protocol.step import Chunk, ChunkResult
from aiakq.runtime.speculation.draft_chain import DraftChain


class DraftModel:
    """A ``ModelProposer`` over a model with the vocabulary of the target model. It has a cache of its own, whose pages
    have the numbers of the target model's: one page table is that of both, and a cached prefix is there for both.

    A draft token is sampled with the parameters, random number and grammar of the token that it is for, so that it is
    accepted as often as the two models agree. Nothing else depends on the draft model: where its cache lacks tokens of
    a sequence, because it had no draft tokens for a while, they are computed when it gets some. Prompts are computed
    with those of the target model, but not in steps where sequences are sampled and none gets draft tokens.

    runner      of the model.
    max_tokens  in one of its steps.
    max_length  tokens of a sequence that it can compute; behind them nothing is proposed.
    """

    def __init__(self, runner: Runner, max_tokens: int, max_length: int) -> None:
        self.runner = runner
        self._max_tokens, self._max_length = max_tokens, max_length
        self._pages: set[int] = set()  # those that hold keys of this model at every position

    def observe(self, step: ModelInput) -> None:
        """Nothing: it reads tokens."""

    def forget_pages(self) -> None:
        """See ``ModelProposer``."""
        self._pages.clear()

    def propose(
        self,
        chunks: list[Chunk],
        sequences: list[SequenceState],
        results: list[ChunkResult],
        running: RunningSequences,
        observed: Tensor | None = None,
    ) -> None:
        """See ``ModelProposer``: observed is None, not [T, hidden]."""
        drafts = []
        num_left = self._max_tokens
        with_prompts = any(chunk.num_proposed for chunk in chunks) or not any(chunk.samples for chunk in chunks)
        before = [self._begin(chunk, sequence) for chunk, sequence in zip(chunks, sequences, strict=True)]
        for chunk, sequence, result in zip(chunks, sequences, results, strict=True):
            num_positions = min(len(sequence.pages) * self.runner.page_size, self._max_length)
            draft = _Draft(chunk, sequence, result, num_positions, self.runner.states)
            if num_left and (draft.num_wanted or (with_prompts and chunk.count > 1 + len(chunk.drafts))):
                num_left -= draft.catch_up(num_left)
                drafts.append(draft)
        proposing = [draft for draft in drafts if draft.next_chunk.count > 0]
        while proposing:
            self._compute(proposing, running)
            proposing = [draft for draft in proposing if draft.wants_more]
            for draft in proposing:
                draft.next_chunk = draft.last_chunk()
        for draft in drafts:
            draft.finish()
        for first, sequence in zip(before, sequences, strict=True):
            assert sequence.num_drafted is not None
            size = self.runner.page_size
            self._pages.update(sequence.pages[first // size : sequence.num_drafted // size])

    def _begin(self, chunk: Chunk, sequence: SequenceState) -> int:
        """The target model wrote ``chunk`` into pages. Returns how many tokens of ``sequence`` this model has computed:
        at first, those of cached pages.
        """
        size = self.runner.page_size
        self._pages.difference_update(sequence.pages[chunk.first // size : -(-(chunk.first + chunk.count) // size)])
        if sequence.num_drafted is None:
            cached = sequence.pages[: chunk.first // size]
            sequence.num_drafted = size * _num_leading(page in self._pages for page in cached)
        return sequence.num_drafted

    def _compute(self, drafts: list[_Draft], running: RunningSequences) -> None:
        """One step of the model; every unfinished draft gets its next token."""
        drafts.sort(key=lambda draft: draft.next_chunk.count > 1)
        sequences = [draft.sequence for draft in drafts]
        step = self.runner.prepare([draft.next_chunk for draft in drafts], sequences, running)
        logits = whole_logits(self.runner.forward(step.model_input))
        last = [(draft, rows[-1]) for draft, rows in zip(drafts, step.logit_rows, strict=True) if draft.num_wanted]
        if not last:
            return
        rows = [draft.row() for draft, _ in last]
        sampled = sample(self.runner.model.sampler, logits[[row for _, row in last]], rows).collect()
        for (draft, _), token in zip(last, sampled, strict=True):
            draft.append(token)


class _Draft(DraftChain):
    """The draft tokens of one sequence in the making. The model may have to compute tokens of the sequence first; where
    that is all, ``num_wanted`` is 0.

    next_chunk  what the model computes next.
    """

    def __init__(
        self,
        chunk: Chunk,
        sequence: SequenceState,
        result: ChunkResult,
        num_positions: int,
        states: StateRows | None,
    ) -> None:
        """states: of the model, if it has recurrent layers."""
        super().__init__(chunk, sequence, result, num_positions)
        self._states = states
        start = sequence.num_drafted
        assert start is not None
        following = sequence.token_ids[start : start + len(sequence.drafted)]
        accepted = (token == draft for token, draft in zip(following, sequence.drafted, strict=False))
        sequence.num_drafted = start + _num_leading(accepted)
        sequence.drafted = []

    def catch_up(self, max_tokens: int) -> int:
        """Compute at most ``max_tokens`` tokens that the model has not seen; returns how many."""
        sequence, chunk = self.sequence, self._chunk
        assert sequence.num_drafted is not None
        end = self._num_known if self.num_wanted else min(self._num_known, chunk.first + chunk.count)
        start = min(sequence.num_drafted, end - 1)
        if self._states is not None:
            start = self._states.last_position(sequence, start)
        count = min(end - start, max_tokens, self._num_positions - start)
        if start + count < end:
            self.num_wanted = 0
        self.next_chunk = Chunk(chunk.slot, start, count, [], self.num_wanted > 0)
        if count > 0:
            sequence.num_drafted = start + count
        return max(0, count)

    def finish(self) -> None:
        """Hand over the draft tokens. The last one was not computed."""
        super().finish()
        self.sequence.drafted = self.tokens[:-1]


def _num_leading(values: Iterable[bool]) -> int:
    """How many of ``values`` come before the first that is false."""
    return sum(1 for _ in takewhile(bool, values))
