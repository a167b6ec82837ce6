"""LocalExecutor: the model in the calling process, on one device.

At most two steps are in flight. The model of the next step is launched behind the one before, with its sampled tokens
taken from the device; the sampler of the next step is launched when the results of the one before have been collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aiakq.kernels.ops.sampling import Sampler
from aiakq.kernels.transfer import on_device
from aiakq.runtime.device_memory import is_out_of_memory, release_memory
from aiakq.runtime.engine.messages import TokenLogprobs
from aiakq.runtime.engine.records import Chunk, ChunkResult, StepBatch, StepResult
from aiakq.runtime.executor.runner import Runner, StepInput
from aiakq.runtime.executor.sampler import SamplerOutput, SamplerRow, prompt_logprobs, sample
from aiakq.runtime.executor.sequences import RunningSequences, SequenceState
from aiakq.runtime.sampling_params import LogitsProcessor


class LocalPendingStep:
    """A step whose model was launched, and whose sampler was too if ``is_sampled``.

    out_of_memory  neither runs.
    """

    def __init__(self, executor: LocalExecutor, chunks: list[Chunk], sequences: list[SequenceState]) -> None:
        self.out_of_memory = False
        self.is_sampled = False
        self._executor = executor
        self._chunks, self._sequences = chunks, sequences
        self._logits: Tensor | None = None
        self._logit_rows: list[range] = []
        self._samples: SamplerOutput | None = None
        self._row_of: dict[SequenceState, int] = {}
        self._scores: dict[int, Callable[[], list[TokenLogprobs]]] = {}

    def collect(self) -> StepResult:
        """See ``PendingStep``."""
        return self._executor.collect(self)

    def fill_unknown(self, step: StepInput, previous: LocalPendingStep | None) -> None:
        """Complete ``step``, on the device: tokens that the host does not know are those that ``previous`` samples."""
        self._logit_rows = step.logit_rows
        if step.unknown:
            assert previous is not None
            previous.copy_tokens(step.unknown, step.model_input.token_ids)

    def launch_model(self, runner: Runner, step: StepInput) -> None:
        """Launch the model over ``step``."""
        self._logits = runner.forward(step.model_input)

    def copy_tokens(self, places: list[tuple[int, SequenceState]], token_ids: Tensor) -> None:
        """Write the tokens sampled for sequences to their places in ``token_ids`` [T], which is modified."""
        assert self._samples is not None
        pairs = [(place, self._row_of[sequence]) for place, sequence in places]
        to, rows = on_device(pairs, token_ids.device).unbind(1)
        token_ids.index_copy_(0, to, self._samples.tokens.index_select(0, rows))

    def launch_sampler(self, sampler: Sampler) -> None:
        """Launch what reads the logits: sampling and prompt log-probabilities. The host knows every token before.

        A sequence whose last token turned out not to be valid is left out.
        """
        logits = self._logits
        assert logits is not None
        self.is_sampled, self._logits = True, None
        sampled: list[SamplerRow] = []
        rows: list[int] = []
        for index, (chunk, sequence) in enumerate(zip(self._chunks, self._sequences, strict=True)):
            if sequence.sampling.prompt_logprobs is not None and chunk.first < sequence.num_prompt:
                self._scores[index] = _prompt_scores(sampler, logits, chunk, sequence, self._logit_rows[index])
            end = chunk.first + chunk.count
            if chunk.samples and end == len(sequence.token_ids):
                self._row_of[sequence] = len(sampled)
                sampled.append(SamplerRow(sequence, end, chunk.resamples))
                rows.append(self._logit_rows[index][-1])
        if sampled:
            # Logits are large: rows that are already in order are not copied.
            in_order = rows == list(range(len(rows)))
            last = logits[: len(rows)] if in_order else logits.index_select(0, on_device(rows, logits.device))
            self._samples = sample(sampler, last, sampled)

    def results(self) -> StepResult:
        """Wait for the results, and append the sampled tokens to the sequences."""
        tokens = self._samples.collect() if self._samples is not None else []
        results = []
        for index, sequence in enumerate(self._sequences):
            row = self._row_of.get(sequence)
            result = ChunkResult() if row is None else ChunkResult([tokens[row]])
            if row is not None and tokens[row].is_valid:
                sequence.token_ids.append(tokens[row].token)
            if index in self._scores:
                result.prompt_logprobs = self._scores[index]()
            results.append(result)
        return StepResult(results)


class LocalExecutor:
    """An ``Executor`` over a ``Runner``.

    num_slots  slots are numbered below this.
    max_pages  most pages of one sequence.
    """

    def __init__(self, runner: Runner, num_slots: int, max_pages: int) -> None:
        self.runner = runner
        self._sampler = runner.model.sampler
        self._sequences = RunningSequences(num_slots, max_pages)
        self._pending: deque[LocalPendingStep] = deque()
        self._processors: dict[str, Sequence[LogitsProcessor]] = {}

    @torch.inference_mode()
    def submit(self, batch: StepBatch) -> LocalPendingStep:
        """See ``Executor``."""
        sequences = self._sequences.update(batch, self._processors)
        if batch.cleared_pages:
            self.runner.clear(batch.cleared_pages)
        previous = self._pending[-1] if self._pending else None
        step = LocalPendingStep(self, batch.chunks, sequences)
        self._pending.append(step)
        if previous is not None and previous.out_of_memory:
            step.out_of_memory = True
            return step
        assert previous is None or previous.is_sampled, "two steps at most may be pending"

        step.out_of_memory = not _fits(lambda: self._compute(step, batch.chunks, sequences, previous))
        return step

    def _compute(
        self,
        step: LocalPendingStep,
        chunks: list[Chunk],
        sequences: list[SequenceState],
        previous: LocalPendingStep | None,
    ) -> None:
        """Launch the model over ``chunks`` and, behind no other step, the sampler."""
        step_input = self.runner.prepare(chunks, sequences, self._sequences)
        step.fill_unknown(step_input, previous)
        self._launch_model(step, step_input)
        if previous is None:
            step.launch_sampler(self._sampler)

    def _launch_model(self, step: LocalPendingStep, step_input: StepInput) -> None:
        step.launch_model(self.runner, step_input)

    @torch.inference_mode()
    def collect(self, step: LocalPendingStep) -> StepResult:
        """The results of the oldest pending step; launches the sampler of the next."""
        oldest = self._pending.popleft()
        assert oldest is step, "steps are collected in order"
        if step.out_of_memory:
            return StepResult(out_of_memory=True)
        result = step.results()
        if self._pending and not self._pending[0].out_of_memory:
            following = self._pending[0]
            following.out_of_memory = not _fits(lambda: following.launch_sampler(self._sampler))
        return result

    def reset(self) -> None:
        """See ``Executor``."""
        self._pending.clear()
        self._sequences.clear()

    def register_logits_processors(self, request_id: str, processors: Sequence[LogitsProcessor]) -> None:
        """Apply ``processors`` to the logits of a request that is about to be added to the engine.

        Functions are no records, so only an executor in the calling process can have them; no other has this method.
        """
        self._processors[request_id] = processors

    def unregister_logits_processors(self, request_id: str) -> None:
        """Forget the processors of a request that has ended, if it had any."""
        self._processors.pop(request_id, None)


def _fits(call: Callable[[], None]) -> bool:
    """Run ``call``; False, and all unused memory is released, if there was not enough."""
    try:
        call()
        return True
    except Exception as failure:
        if not is_out_of_memory(failure):
            raise
    # Outside the except clause: the traceback held tensors.
    release_memory()
    return False


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
