"""SampledStep: from the logits of a step, or what the model returns instead, to its results."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from aiakq.kernels.ops.sampling import Sampler
from aiakq.kernels.transfer import copies_on_host, on_device
from aiakq.runtime.executor.pooler import PromptPooler
from aiakq.runtime.executor.sampler import SamplerOutput, SamplerRow, prompt_logprobs, sample
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.step import (
    GRAMMAR_FAILED,
    NOT_FINITE,
    Chunk,
    ChunkResult,
    SampledToken,
    StepResult,
    TokenLogprobs,
)


class SampledStep:
    """The chunks of a step, each with its sequence, and what is sampled for them.

    is_sampled         whether the sampler was launched.
    chunks, sequences  of the step.
    """

    def __init__(self, chunks: list[Chunk], sequences: list[SequenceState]) -> None:
        self.is_sampled = False
        self.chunks, self.sequences = chunks, sequences
        self._logits: Tensor | None = None
        self._logit_rows: list[range] = []
        self._samples: SamplerOutput | None = None
        self._row_of: dict[SequenceState, int] = {}  # the first, if there are drafts
        self._scores: dict[int, Callable[[], list[TokenLogprobs]]] = {}
        self._outputs: Callable[[], list[Tensor]] | None = None
        self._width = 0

    def take_logits(self, logits: Tensor, rows: list[range]) -> None:
        """The logits [R, V] that the model computed, or will have, and each chunk's rows of them."""
        self._logits, self._logit_rows = logits, rows

    def copy_tokens(self, targets: list[tuple[int, SequenceState]], token_ids: Tensor) -> None:
        """Write the tokens sampled for sequences to their places in ``token_ids`` [T], which is modified."""
        assert self._samples is not None
        pairs = [(target, self._row_of[sequence]) for target, sequence in targets]
        to, rows = on_device(pairs, token_ids.device).unbind(1)
        token_ids.index_copy_(0, to, self._samples.tokens.index_select(0, rows))

    def launch_sampler(self, sampler: Sampler) -> None:
        """Launch what reads the logits: sampling and prompt log-probabilities. The host knows every token before.

        A sequence whose last token turned out not to be valid is left out.
        """
        logits = self._logits
        assert logits is not None
        self.is_sampled, self._logits = True, None
        if any(sequence.pooler is not None for sequence in self.sequences):
            self._width = logits.shape[1]
            # The next step writes over them.
            self._outputs = copies_on_host(logits.clone() if logits.device.type == "cpu" else logits)
        sampled: list[SamplerRow] = []
        rows: list[int] = []
        for index, (chunk, sequence) in enumerate(zip(self.chunks, self.sequences, strict=True)):
            if sequence.sampling.prompt_logprobs is not None and chunk.first < sequence.num_prompt:
                self._scores[index] = _prompt_scores(sampler, logits, chunk, sequence, self._logit_rows[index])
            known = chunk.first + chunk.count - len(chunk.drafts)
            if chunk.samples and known == len(sequence.token_ids):
                self._row_of[sequence] = len(sampled)
                sampled.append(SamplerRow(sequence, [], chunk.resamples))
                for draft_index, draft in enumerate(chunk.drafts):
                    matcher = sampled[-1].matcher
                    ahead = None if matcher is None else matcher.after(draft)
                    sampled.append(SamplerRow(sequence, chunk.drafts[: draft_index + 1], chunk.resamples, ahead))
                rows += self._logit_rows[index][-1 - len(chunk.drafts) :]
        if sampled:
            # Logits are large: rows that are already in order are not copied.
            in_order = rows == list(range(len(rows)))
            last = logits[: len(rows)] if in_order else logits.index_select(0, on_device(rows, logits.device))
            self._samples = sample(sampler, last, sampled)

    def results(self) -> StepResult:
        """Wait for the results, and append the sampled tokens to the sequences."""
        tokens = self._samples.collect() if self._samples is not None else []
        results = []
        for index, (chunk, sequence) in enumerate(zip(self.chunks, self.sequences, strict=True)):
            row = self._row_of.get(sequence)
            result = ChunkResult()
            if row is not None:
                result.sampled = _accepted(sequence, chunk.drafts, tokens[row : row + len(chunk.drafts) + 1])
                if chunk.num_forced and sequence.matcher is not None:
                    result.proposed = sequence.matcher.forced_tokens(chunk.num_forced)
                    result.is_forced = bool(result.proposed)
            if index in self._scores:
                result.prompt_logprobs = self._scores[index]()
            if sequence.pooler is not None:
                self._pool(index, sequence.pooler, result)
            if sequence.failure is not None:
                result = ChunkResult([SampledToken(0, 0.0, error=sequence.failure)])
            results.append(result)
        return StepResult(results)

    def _pool(self, index: int, pooler: PromptPooler, result: ChunkResult) -> None:
        """Add the outputs for one chunk to its prompt's; behind the last one, fill in the result."""
        assert self._outputs is not None
        chunk, sequence, rows = self.chunks[index], self.sequences[index], self._logit_rows[index]
        pooler.add(self._outputs()[0][rows.start : rows.stop], chunk.first, chunk.count)
        if chunk.first + chunk.count == sequence.num_prompt:
            result.pooled, result.pooling_error = pooler.result(self._width)


def _accepted(sequence: SequenceState, drafts: list[int], tokens: list[SampledToken]) -> list[SampledToken]:
    """Append ``tokens`` to ``sequence``, one after each of ``drafts`` and one before them, up to the first that is not
    the draft; returns them.
    """
    accepted: list[SampledToken] = []
    for draft, sampled in zip([*drafts, None], tokens, strict=True):
        if accepted and not sampled.is_valid:
            break  # the next step finds out again, with nothing before it
        _check_grammar(sequence, sampled)
        accepted.append(sampled)
        if not sampled.is_valid:
            break
        sequence.token_ids.append(sampled.token)
        if sampled.ends or sampled.token != draft:
            break
    return accepted


def _check_grammar(sequence: SequenceState, sampled: SampledToken) -> None:
    """Advance the grammar of ``sequence`` by what was sampled, and note there if it ends, or fails."""
    matcher = sequence.matcher
    if sequence.spec.grammar is None or sampled.error == NOT_FINITE:
        return
    if matcher is not None and sampled.is_valid:
        matcher.advance(sampled.token)
        sampled.ends = matcher.is_finished
    if matcher is None or matcher.failure is not None:
        sampled.error = GRAMMAR_FAILED


def _prompt_scores(
    sampler: Sampler, logits: Tensor, chunk: Chunk, sequence: SequenceState, rows: range
) -> Callable[[], list[TokenLogprobs]]:
    """Log-probabilities of the prompt tokens that ``rows`` predict."""
    count = sequence.sampling.prompt_logprobs
    assert count is not None
    targets = sequence.token_ids[chunk.first + 1 : min(chunk.first + chunk.count + 1, sequence.num_prompt)]
    if not targets:
        return list
    return prompt_logprobs(sampler, logits[rows.start : rows.start + len(targets)], targets, count)
