"""SampledStep: from the logits of a step, or what the model returns instead, to its results."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aiakq.kernels.ops.sampling import Sampler
from aiakq.kernels.transfer import on_device
from aiakq.runtime.executor.output_reader import FillResult, ModelOutput
from aiakq.runtime.executor.row_transforms import RowMask
from aiakq.runtime.executor.sampler import SamplerOutput, SamplerRow, sample
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.step import Chunk, ChunkResult, SampledToken, StepResult


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
        self._reads: dict[int, FillResult] = {}

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
        """Launch what reads the logits: sampling and readers of sequences. The host knows every token before.

        A sequence whose last token turned out not to be valid is left out.
        """
        logits = self._logits
        assert logits is not None
        self.is_sampled, self._logits = True, None
        output: ModelOutput | None = None
        sampled: list[SamplerRow] = []
        rows: list[int] = []
        for index, (chunk, sequence) in enumerate(zip(self.chunks, self.sequences, strict=True)):
            if sequence.reader is not None:
                output = output or ModelOutput(logits, sampler)
                fill = sequence.reader.read(chunk, output, self._logit_rows[index])
                if fill is not None:
                    self._reads[index] = fill
            drafts = chunk.drafts
            if chunk.samples and chunk.first + chunk.count - len(drafts) == len(sequence.token_ids):
                self._row_of[sequence] = len(sampled)
                masks: Sequence[RowMask] = sequence.masks
                sampled.append(SamplerRow(sequence, [], chunk.resamples, masks))
                for count, draft in enumerate(drafts, 1):
                    masks = masks and [mask.after(draft) for mask in masks]
                    sampled.append(SamplerRow(sequence, drafts[:count], chunk.resamples, masks))
                rows += self._logit_rows[index][-1 - len(drafts) :]
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
            if row is None:
                result = ChunkResult()
            else:
                own = tokens[row : row + len(chunk.drafts) + 1]
                result = ChunkResult(_accepted(sequence, chunk.drafts, own))
                for mask in sequence.masks:
                    result.proposed = result.proposed or mask.forced_tokens(chunk.num_forced)
                    result.is_forced = bool(result.proposed)
            if index in self._reads:
                self._reads[index](result)
            if sequence.failure is not None:
                result = ChunkResult([SampledToken(0, 0.0, error=sequence.failure)])
            results.append(result)
        return StepResult(results)


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
