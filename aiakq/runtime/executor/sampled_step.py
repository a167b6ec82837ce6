"""SampledStep: from the logits of a step, or what the model returns instead, to its results."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aiakq.kernels.ops.sampling import Sampler
from aiakq.kernels.transfer import on_device
from aiakq.runtime.executor.output_reader import FillResult, ModelOutput
from aiakq.runtime.executor.row_transforms import RowMask
from aiakq.runtime.executor.sampler import SamplerColumns, SamplerOutput, SamplerRow, sample
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.step import NO_DECODES, Chunk, ChunkResult, DecodeResults, Decodes, SampledToken, StepResult


class DecodeRows:
    """The rows of the sequences that decoded last: those of the next step are mostly the same."""

    def __init__(self) -> None:
        self._rows: dict[SequenceState, SamplerRow] = {}
        self._sequences: list[SequenceState] = []
        self._columns = SamplerColumns([])

    def columns(self, sequences: list[SequenceState]) -> SamplerColumns:
        """One row of each sequence, behind its tokens."""
        if sequences != self._sequences:
            known = self._rows
            rows = [known.get(one) or SamplerRow(one, [], masks=one.masks) for one in sequences]
            self._rows, self._sequences = dict(zip(sequences, rows, strict=True)), sequences
            self._columns = SamplerColumns(rows, True)
        return self._columns


class SampledStep:
    """The chunks of a step, each with its sequence, and what is sampled for them.

    is_sampled         whether the sampler was launched.
    decodes, chunks    of the step.
    sequences          of ``decodes``, then those of ``chunks``.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        sequences: list[SequenceState],
        decodes: Decodes = NO_DECODES,
        decode_rows: DecodeRows | None = None,
    ) -> None:
        self.is_sampled = False
        self.decodes = decodes
        self.chunks, self.sequences = chunks, sequences
        self._decode_rows = decode_rows
        self._logits: Tensor | None = None
        self._logit_rows: list[range] = []
        self._decoded: SamplerColumns | None = None  # the first rows
        self._samples: SamplerOutput | None = None
        self._row_of: dict[SequenceState, int] = {}  # of sequences of chunks; the first, if there are drafts
        self._reads: dict[int, FillResult] = {}

    @property
    def num_sampled(self) -> int:
        """The number of sequences for which a token was sampled."""
        return len(self._row_of) + (0 if self._decoded is None else len(self._decoded))

    def take_logits(self, logits: Tensor, rows: list[range]) -> None:
        """The logits [R, V] that the model computed, or will have, and the rows of each of ``chunks``; those of
        ``decodes`` are the first.
        """
        self._logits, self._logit_rows = logits, rows

    def copy_tokens(self, places: list[int], sequences: list[SequenceState], token_ids: Tensor) -> None:
        """Write the tokens sampled for sequences to their places in ``token_ids`` [T], which is modified."""
        assert self._samples is not None
        num_decoded, tokens = len(self.decodes.slots), self._samples.tokens
        decoded = self.sequences[:num_decoded]
        if sequences == decoded and places[-1] == len(places) - 1:  # as many as there are, so the first
            token_ids[:num_decoded].copy_(tokens[:num_decoded])
            return
        row_of = {sequence: row for row, sequence in enumerate(decoded)} | self._row_of
        pairs = [places, [row_of[sequence] for sequence in sequences]]
        to, rows = on_device(pairs, token_ids.device).unbind(0)
        token_ids.index_copy_(0, to, tokens.index_select(0, rows))

    def launch_sampler(self, sampler: Sampler) -> None:
        """Launch what reads the logits: sampling and readers of sequences. The host knows every token before.

        A sequence whose last token turned out not to be valid is left out.
        """
        logits = self._logits
        assert logits is not None
        self.is_sampled, self._logits = True, None
        if self.decodes.slots:
            self._decode()
        num_decoded = len(self.decodes.slots)
        output: ModelOutput | None = None
        sampled: list[SamplerRow] = []
        rows: list[int] = []
        for index, (chunk, sequence) in enumerate(zip(self.chunks, self.sequences[num_decoded:], strict=True)):
            if sequence.reader is not None:
                output = output or ModelOutput(logits, sampler)
                fill = sequence.reader.read(chunk, output, self._logit_rows[index])
                if fill is not None:
                    self._reads[index] = fill
            drafts = chunk.drafts
            if chunk.samples and chunk.first + chunk.count - len(drafts) == len(sequence.token_ids):
                self._row_of[sequence] = num_decoded + len(sampled)
                masks: Sequence[RowMask] = sequence.masks
                sampled.append(SamplerRow(sequence, [], chunk.resamples, masks))
                for count, draft in enumerate(drafts, 1):
                    masks = masks and [mask.after(draft) for mask in masks]
                    sampled.append(SamplerRow(sequence, drafts[:count], chunk.resamples, masks))
                rows += self._logit_rows[index][-1 - len(drafts) :]
        decoded = self._decoded
        if not sampled and decoded is None:
            return
        # Logits are large: rows that are already in order are not copied.
        count = num_decoded + len(rows)
        if rows == list(range(num_decoded, count)):
            logits = logits[:count]
        else:
            logits = logits.index_select(0, on_device([*range(num_decoded), *rows], logits.device))
        if decoded is None:
            self._samples = sample(sampler, logits, sampled)
        else:
            both = SamplerColumns(sampled).behind(decoded) if sampled else decoded
            self._samples = sample(sampler, logits, both)

    def _decode(self) -> None:
        """Find the rows of ``decodes``. If not all are sampled, they become a part of ``chunks`` instead."""
        decodes = self.decodes
        num_decoded = len(decodes.slots)
        sequences = self.sequences[:num_decoded]
        positions = list(map(len, [sequence.token_ids for sequence in sequences]))
        if positions == [first + 1 for first in decodes.firsts]:
            self._decoded = (self._decode_rows or DecodeRows()).columns(sequences)
            self._decoded.advance(positions)
        else:
            self.chunks, self.decodes = decodes.chunks() + self.chunks, NO_DECODES
            self._logit_rows = [range(row, row + 1) for row in range(num_decoded)] + self._logit_rows

    def results(self) -> StepResult:
        """Wait for the results, and append the sampled tokens to the sequences."""
        samples = self._samples
        results = []
        for index, (chunk, sequence) in enumerate(
            zip(self.chunks, self.sequences[len(self.decodes.slots) :], strict=True)
        ):
            row = self._row_of.get(sequence)
            if row is None:
                result = ChunkResult()
            else:
                assert samples is not None
                own = [samples.sampled(at) for at in range(row, row + len(chunk.drafts) + 1)]
                result = ChunkResult(_accepted(sequence, chunk.drafts, own))
                for mask in sequence.masks:
                    result.proposed = result.proposed or mask.forced_tokens(chunk.num_forced)
                    result.is_forced = bool(result.proposed)
            if index in self._reads:
                self._reads[index](result)
            if sequence.failure is not None:
                result = ChunkResult.of_failure(sequence.failure)
            results.append(result)
        if self._decoded is None:
            return StepResult(results)
        assert samples is not None
        return StepResult(results, decodes=_decode_results(self._decoded, samples))


def _decode_results(columns: SamplerColumns, samples: SamplerOutput) -> DecodeResults:
    """Append the first ``samples``, those of ``columns``, to their sequences; returns them."""
    count, found = len(columns), samples.results
    results = DecodeResults(found.tokens[:count], found.logprobs[:count])
    if found.ranks:
        results.top = samples.all_logprobs(count)
    others = results.others
    for row in found.failed:
        if row < count:
            others[row] = ChunkResult([samples.sampled(row)])
    for row in columns.masked:
        [sampled] = others[row].sampled if row in others else [samples.sampled(row)]
        for mask in columns.rows[row].sequence.masks:
            mask.follow(sampled)
        if sampled.ends or not sampled.is_valid:
            others[row] = ChunkResult([sampled])
    for row in columns.failed:
        failure = columns.rows[row].sequence.failure
        assert failure is not None
        others[row] = ChunkResult.of_failure(failure)
    if not others:
        for token_ids, token in zip(columns.token_ids, results.tokens, strict=True):
            token_ids.append(token)
        return results
    for row, (token_ids, token) in enumerate(zip(columns.token_ids, results.tokens, strict=True)):
        if row not in others or others[row].sampled[0].is_valid:
            token_ids.append(token)
    return results


def _accepted(sequence: SequenceState, drafts: list[int], tokens: list[SampledToken]) -> list[SampledToken]:
    """Append ``tokens`` to ``sequence``, one after each of ``drafts`` and one before them, up to the first that is not
    the draft; returns them.
    """
    if not drafts and not sequence.masks:
        if tokens[0].is_valid:
            sequence.token_ids.append(tokens[0].token)
        return tokens
    accepted: list[SampledToken] = []
    for draft, sampled in zip([*drafts, None], tokens, strict=True):
        if accepted and not sampled.is_valid:
            break  # the next step finds out again, with nothing before it
        for mask in sequence.masks:
            mask.follow(sampled)
        accepted.append(sampled)
        if not sampled.is_valid:
            break
        sequence.token_ids.append(sampled.token)
        if sampled.ends or sampled.token != draft:
            break
    return accepted
