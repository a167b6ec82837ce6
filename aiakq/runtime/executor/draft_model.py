"""DraftModel: a second, faster model that guesses what the first will sample."""

from __future__ import annotations

from collections.abc import Sequence

from aiakq.runtime.engine.records import Chunk, ChunkResult, SampledToken
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sampler import SamplerRow, sample
from aiakq.runtime.executor.sequences import RunningSequences, SequenceState
from aiakq.runtime.models.decoder import whole_logits


class DraftModel:
    """Guesses for the sequences of an executor. Its keys and values are in pages with the numbers of those of the
    executor's model, in a cache of its own: one page table is that of both, and a cached prefix is there for both.

    A token is guessed as it will be sampled, with the same parameters, random number and grammar, so that guesses are
    right as often as the two models agree. Nothing else depends on them: where the cache lacks tokens of a sequence,
    because nothing was guessed for it, they are computed when something is.

    runner      of the model.
    max_tokens  in one of its steps.
    max_length  tokens of a sequence that it can compute; nothing is guessed behind them.
    """

    def __init__(self, runner: Runner, max_tokens: int, max_length: int) -> None:
        self.runner = runner
        self._max_tokens, self._max_length = max_tokens, max_length

    def propose(
        self, chunks: list[Chunk], sequences: list[SequenceState], results: list[ChunkResult], running: RunningSequences
    ) -> None:
        """Compute the tokens of ``chunks``, and fill in ``proposed`` of ``results`` where it is asked for."""
        drafts = []
        left = self._max_tokens
        for chunk, sequence, result in zip(chunks, sequences, results, strict=True):
            room = min(len(sequence.pages) * self.runner.page_size, self._max_length)
            draft = _Draft(chunk, sequence, result, room)
            if left and (draft.most or chunk.count > 1 + len(chunk.drafts)):
                left -= draft.catch_up(left)
                drafts.append(draft)
        going = [draft for draft in drafts if draft.next_chunk.count > 0]
        while going:
            self._compute(going, running)
            going = [draft for draft in going if draft.prepare_next()]
        for draft in drafts:
            draft.finish()

    def _compute(self, drafts: list[_Draft], running: RunningSequences) -> None:
        """One step of the model; each draft that goes on gets its next guess."""
        drafts.sort(key=lambda draft: draft.next_chunk.count > 1)
        sequences = [draft.sequence for draft in drafts]
        step = self.runner.prepare([draft.next_chunk for draft in drafts], sequences, running)
        logits = whole_logits(self.runner.forward(step.model_input))
        guessing = [(draft, rows[-1]) for draft, rows in zip(drafts, step.logit_rows, strict=True) if draft.most]
        if not guessing:
            return
        rows = [SamplerRow(draft.sequence, list(draft.tokens), matcher=draft.matcher) for draft, _ in guessing]
        found = sample(self.runner.model.sampler, logits[[row for _, row in guessing]], rows).collect()
        for (draft, _), sampled in zip(guessing, found, strict=True):
            draft.take(sampled)


class _Draft:
    """The guesses for one sequence in the making.

    tokens      guessed so far.
    most        how many are wanted; 0: the tokens of the sequence are computed, and nothing is guessed.
    matcher     of the grammar, behind ``tokens``; None: there is none.
    next_chunk  what the model computes next.
    """

    def __init__(self, chunk: Chunk, sequence: SequenceState, result: ChunkResult, room: int) -> None:
        self.sequence, self.matcher = sequence, sequence.matcher
        self.tokens: list[int] = []
        self._chunk, self._result = chunk, result
        self._room = room  # tokens whose keys have a place
        self._known = len(sequence.token_ids)
        last = result.sampled[-1] if result.sampled else None
        goes_on = last is not None and last.is_valid and not last.ends and not sequence.modifier.calls_functions
        self.most = chunk.num_proposed if goes_on and not result.proposed else 0
        if sequence.num_drafted is None:
            sequence.num_drafted = chunk.first  # what is before it is a cached prefix
        start = sequence.num_drafted
        sequence.num_drafted += _num_equal(sequence.token_ids[start : start + len(sequence.drafted)], sequence.drafted)
        sequence.drafted = []

    def catch_up(self, most: int) -> int:
        """Compute at most ``most`` tokens that the model has not seen; returns how many."""
        sequence, chunk = self.sequence, self._chunk
        assert sequence.num_drafted is not None
        end = self._known if self.most else min(self._known, chunk.first + chunk.count)
        start = min(sequence.num_drafted, end - 1)
        count = min(end - start, most, self._room - start)
        if start + count < end:
            self.most = 0
        self.next_chunk = Chunk(chunk.slot, start, count, [], self.most > 0)
        if count > 0:
            sequence.num_drafted = start + count
        return max(0, count)

    def take(self, sampled: SampledToken) -> None:
        """The next guess."""
        if not sampled.is_valid:
            self.most = len(self.tokens)
            return
        self.tokens.append(sampled.token)
        if self.matcher is not None and len(self.tokens) < self.most:
            self.matcher = self.matcher.after(sampled.token)
            if self.matcher.failure is not None:
                self.most = len(self.tokens)

    def prepare_next(self) -> bool:
        """Whether another guess is wanted, and there is room for the keys of the one before."""
        place = self._known + len(self.tokens) - 1
        self.next_chunk = Chunk(self._chunk.slot, place, 1, [], True, drafts=self.tokens[-1:])
        return len(self.tokens) < self.most and place < self._room

    def finish(self) -> None:
        """Hand over the guesses. The last one was not computed."""
        if self.tokens:
            self._result.proposed = self.tokens
            self.sequence.drafted = self.tokens[:-1]


def _num_equal(tokens: Sequence[int], guesses: Sequence[int]) -> int:
    """How many of ``guesses`` from the first on are ``tokens``."""
    count = 0
    while count < min(len(tokens), len(guesses)) and tokens[count] == guesses[count]:
        count += 1
    return count
