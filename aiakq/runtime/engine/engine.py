"""Engine: a state machine with one transition, ``step(now, inbox) -> StepOutput``.

A step takes what arrived, schedules chunks, submits them to the executor and commits the results of pending steps.
There is no clock, thread, socket or random source in here, so a run can be repeated exactly; ``loop.run`` supplies the
clock and the inbox.

With ``max_pending_steps`` of 2 the next step is submitted before the last one's results are collected, so that a GPU
computes while the host works (docs/decisions/0016-asynchronous-scheduling.md).
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from aiakq.errors import error
from aiakq.runtime.engine.decode_results import add_token, append_tokens, continued_outputs, plain_rows
from aiakq.runtime.engine.executor import Executor, PendingStep
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk, ScheduledDecodes, ScheduledStep, Sequence
from aiakq.runtime.protocol.command import (
    Abort,
    Command,
    ExecutorCommand,
    Inbox,
    ResetPrefixCache,
    ResetSequences,
    UseVocabulary,
)
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import (
    OUT_OF_MEMORY,
    ContinuedOutputs,
    DraftCounts,
    EngineStats,
    RequestTimes,
    StepOutput,
    TokenOutput,
)
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import (
    NO_DECODES,
    NOT_FINITE,
    ChunkResult,
    DecodeResults,
    StepBatch,
    StepResult,
    TokenLogprobs,
)
from aiakq.runtime.protocol.vocabulary import Vocabulary

#: The id of the request with which the engine tests the model.
PROBE = "probe"
_NOTHING_CONTINUED = ContinuedOutputs()


class Engine:
    """Continuous batching over a paged KV cache.

    limits  what requests are checked against (``messages.admit``).
    facts   what the start-up table shows: dtype and why, kernels per layer kind, pages.
    stats   after the last step.
    max_pending_steps  steps that may be submitted and not collected; 1 is synchronous.
    on_start           is called with the ids of requests that are scheduled for the first time, before the step runs:
                       it may be the last thing that this process does.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        limits: ModelLimits,
        facts: dict[str, str],
        max_pending_steps: int = 1,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.limits = limits
        self.facts = facts
        self.max_pending_steps = max_pending_steps
        self.on_start: Callable[[list[str]], None] = lambda request_ids: None
        self.stats = EngineStats(num_pages=scheduler.pool.num_usable, num_free_pages=scheduler.pool.num_free)
        self._sequences: dict[str, Sequence] = {}
        self._pending: deque[tuple[ScheduledStep, PendingStep]] = deque()
        self._continued = _NOTHING_CONTINUED  # of the step that was committed last
        self._cleared_pages: list[int] = []
        self._prompt_tokens = 0
        self._drafts = DraftCounts()
        self._bad_steps = 0  # in a row, without a finite row

    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self._sequences)

    def preparations(self) -> dict[Command, Future[Any]]:
        """What the executor prepares while steps run; a command goes into the inbox when its future is done."""
        return {command: ready for each in self.scheduler.resources for command, ready in each.preparations.items()}

    def is_stalled(self) -> bool:
        """Whether the last step had nothing to compute, because all sequences await ``preparations``."""
        return not self._pending and not self.stats.num_scheduled_tokens

    def step(self, now: float, inbox: Inbox) -> StepOutput:
        """Take ``inbox``, submit a step, and return the results of earlier ones. ``now`` is in seconds on the caller's
        clock.

        Raises ``model_broken`` when the model no longer computes anything finite.
        """
        outputs: list[TokenOutput] = []
        self._continued = _NOTHING_CONTINUED
        if self._bad_steps >= 2:
            self._check_model(now, outputs)
            self._list_continued(outputs)
        for message in inbox:
            if isinstance(message, RequestSpec):
                self._add(message, now)
            elif isinstance(message, ResetPrefixCache):
                self.scheduler.reset_prefix_cache()
            elif isinstance(message, Abort):
                for request_id in message.request_ids:
                    self._abort(request_id, outputs)
            else:
                any(resource.handle(message) for resource in self.scheduler.resources)
        if self._pending and (self.scheduler.may_preempt() or self.scheduler.awaits_results()):
            # Sequences that ended free their pages, and no sequence is preempted while a token of it is pending.
            self._collect(0, now, outputs)
        chunks = self.scheduler.schedule(now)
        for resource in self.scheduler.resources:
            resource.prepare(self.executor)
        started = [chunk.sequence for chunk in chunks if chunk.sequence.times.scheduled is None]
        for sequence in started:
            sequence.times.scheduled = now
        if started:
            self.on_start([sequence.id for sequence in started])
        num_scheduled = chunks.num_tokens
        if num_scheduled:
            self._pending.append((chunks, self._submit(chunks)))
        # Without new work every step brings the results of one that is pending.
        self._collect(self.max_pending_steps - 1 if num_scheduled else len(self._pending) - 1, now, outputs)
        self._count(num_scheduled, outputs)
        return StepOutput(outputs, self.stats, self._continued)

    def abort_all(self) -> list[TokenOutput]:
        """Abort every request, drop what is pending, and return the requests' last outputs."""
        outputs: list[TokenOutput] = []
        self._continued = _NOTHING_CONTINUED  # it was of an earlier step
        for request_id in list(self._sequences):
            self._abort(request_id, outputs)
        self._pending.clear()
        self.scheduler.freed_slots.clear()
        self._send(ResetSequences())
        for resource in self.scheduler.resources:
            resource.prepare(self.executor)
        self._count(0, outputs)
        return outputs

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the vocabulary for grammars. Called before the first request with a grammar."""
        self._send(UseVocabulary(vocabulary.resized(self.limits.vocab_size, self.limits.eos_token_ids)))

    def check(self) -> None:
        """Assert the invariants that hold between steps: no page or slot lost, used twice or mixed up, and every
        awaited token is sampled by a pending step.
        """
        self.scheduler.check()
        awaited: list[tuple[Sequence, ScheduledChunk | ScheduledDecodes]] = []
        for step, _ in self._pending:
            awaited += [(chunk.sequence, chunk) for chunk in step if not chunk.dropped]
            if (decodes := step.decodes) is not None:
                awaited += [(one, decodes) for one in decodes.sequences if one not in decodes.dropped]
        assert len(self._pending) <= max(self.max_pending_steps - 1, 0)
        assert all(self._sequences[sequence.id] is sequence for sequence, _ in awaited)
        assert all(chunk in sequence.pending_chunks for sequence, chunk in awaited)
        assert sum(len(sequence.pending_chunks) for sequence in self._sequences.values()) == len(awaited)

    def _add(self, spec: RequestSpec, now: float) -> None:
        assert spec.request_id not in self._sequences, f"request {spec.request_id} was added twice"
        sequence = Sequence(spec, RequestTimes(arrived=now))
        self._sequences[spec.request_id] = sequence
        self.scheduler.add(sequence)

    def _abort(self, request_id: str, outputs: list[TokenOutput]) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            output = self._output(sequence)
            self._finish(sequence, output, "abort")
            outputs.append(output)

    def _submit(self, chunks: ScheduledStep) -> PendingStep:
        """Submit a step, and with it what changed since the one before."""
        decodes = NO_DECODES if chunks.decodes is None else chunks.decodes.record()
        freed, self.scheduler.freed_slots = self.scheduler.freed_slots, []
        cleared, self._cleared_pages = self._cleared_pages, []
        sequences = [chunk.sequence for chunk in chunks]
        new = [sequence.introduction() for sequence in sequences if sequence.num_submitted_pages is None]
        records = [chunk.record() for chunk in chunks]
        commands: list[ExecutorCommand] = []
        for resource in self.scheduler.resources:
            commands += resource.commands()
        return self.executor.submit(StepBatch(freed, cleared, new, records, commands, decodes))

    def _send(self, *commands: ExecutorCommand) -> None:
        """Have the executor apply ``commands`` now."""
        if commands:
            self.executor.submit(StepBatch(commands=list(commands))).collect()

    def _collect(self, max_pending: int, now: float, outputs: list[TokenOutput]) -> None:
        """Collect and commit the oldest steps until at most ``max_pending`` are pending."""
        while len(self._pending) > max(max_pending, 0):
            chunks, pending = self._pending.popleft()
            result = pending.collect()
            if result.out_of_memory:
                self._run_again(chunks.expanded(), now, outputs)
            else:
                self._commit_step(chunks, result, now, outputs)

    def _run_again(self, chunks: list[ScheduledChunk], now: float, outputs: list[TokenOutput]) -> None:
        """Run a step that did not fit into memory in parts, then those that were pending behind it."""
        later = []
        while self._pending:
            behind, pending = self._pending.popleft()
            pending.collect()  # out of memory as well: a step does not run after one that did not
            later.append(behind.expanded())
        alive = [chunk for chunk in chunks if not chunk.dropped]
        # The memory that was released may suffice for one chunk, or for fewer than before.
        retry_whole = len(alive) == 1 or len(alive) < len(chunks)
        for part in [[alive] if retry_whole else _halves(alive), *([behind] for behind in later)]:
            self._run_parts(part, now, outputs)

    def _run_parts(self, parts: list[list[ScheduledChunk]], now: float, outputs: list[TokenOutput]) -> None:
        """Run and commit parts of a step one after the other, in halves where one does not fit into memory; a sequence
        whose chunk does not fit alone fails.
        """
        for part in parts:
            alive = ScheduledStep(chunk for chunk in part if not chunk.dropped)
            result = self._submit(alive).collect() if alive else StepResult()
            if not result.out_of_memory:
                self._commit_step(alive, result, now, outputs)
            elif len(alive) > 1:
                self._run_parts(_halves(alive), now, outputs)
            else:
                self._fail(alive[0].sequence, OUT_OF_MEMORY, outputs)

    def _check_model(self, now: float, outputs: list[TokenOutput]) -> None:
        """Raise ``model_broken`` if the model fails on a prompt of our own, too: the requests may all be hostile."""
        self._collect(0, now, outputs)
        pages = self.scheduler.pool.allocate(1) if self._bad_steps >= 2 else None
        if pages is None:
            return
        # The slot after those of the scheduler.
        slot = self.scheduler.max_num_seqs
        spec = self.limits.shortest_request(PROBE)
        sequence = Sequence(spec, RequestTimes(arrived=now), slot=slot, pages=pages)
        result = self._submit(ScheduledStep([ScheduledChunk.of(sequence, 1)])).collect()
        self.scheduler.freed_slots.append(slot)
        self.scheduler.pool.decref(pages)
        if not result.out_of_memory:
            if result.chunks[0].failure == NOT_FINITE:
                raise error("model_broken")
            self._bad_steps = 0

    def _commit_step(self, step: ScheduledStep, result: StepResult, now: float, outputs: list[TokenOutput]) -> None:
        """Take over the results of a step."""
        if self._continued.request_ids:
            self._list_continued(outputs)
        pairs: list[tuple[ScheduledChunk, ChunkResult]] = []
        any_plain = False
        if step.decodes is None or result.decodes is None:
            pairs += zip(step if step.decodes is None else step.expanded(), result.chunks, strict=True)
        else:
            any_plain = self._commit_decodes(step.decodes, result.decodes, now, outputs)
            pairs += [(step.decodes.chunk(number), part) for number, part in result.decodes.others.items()]
            pairs += zip(step, result.chunks, strict=True)
        committed = [(one, part) for one, part in pairs if not one.dropped]
        for chunk, part in committed:
            self._commit(chunk, part, now, outputs)
        if any_plain or any(part.is_finite for _, part in committed):
            self._bad_steps = 0
        elif any(part.failure == NOT_FINITE for _, part in committed):
            self._bad_steps += 1

    def _commit_decodes(
        self, decodes: ScheduledDecodes, results: DecodeResults, now: float, outputs: list[TokenOutput]
    ) -> bool:
        """Take over the tokens of a step for steady sequences, but not ``results.others``. False if there are none."""
        rows = plain_rows(decodes, results)
        if not rows:
            return False
        ended = append_tokens(decodes, results.tokens, rows, now)
        for chunk in decodes.filling(self.scheduler.pool.page_size, rows):
            self.scheduler.insert_pages(chunk)
        for row, (reason, stop_reason) in ended.items():
            sequence = decodes.sequences[row]
            output = self._output(sequence)
            add_token(output, results, row)
            self._finish(sequence, output, reason)
            output.stop_reason = stop_reason
            outputs.append(output)
        self._continued = continued_outputs(decodes, results, [row for row in rows if row not in ended])
        return True

    def _list_continued(self, outputs: list[TokenOutput]) -> None:
        """Append the outputs in columns to ``outputs``: more are to come of the same requests."""
        outputs += self._continued.each()
        self._continued = _NOTHING_CONTINUED

    def _commit(self, chunk: ScheduledChunk, result: ChunkResult, now: float, outputs: list[TokenOutput]) -> None:
        """Take over the result of one chunk."""
        sequence = chunk.sequence
        sequence.collected(chunk)
        failure = result.failure
        if failure is not None:
            if failure == NOT_FINITE:
                # Its keys and values may not be finite either: no other sequence may share or inherit them.
                self._cleared_pages += self.scheduler.pool.evict(sequence.pages)
            for resource in self.scheduler.resources:
                resource.fail(sequence, failure)
            self._fail(sequence, failure, outputs)
            return
        if result.prompt_logprobs is not None:
            self._keep_prompt_logprobs(chunk, result.prompt_logprobs)
        for sampled in result.sampled:
            if sampled.resample:
                sequence.resample()
                return
        if not result.sampled:
            self.scheduler.insert_pages(chunk)
        if not sequence.prompt_done and chunk.end >= sequence.num_prompt:
            # What a preemption repeats does not count again.
            sequence.prompt_done = True
            self._prompt_tokens += sequence.num_prompt
        if result.sampled:
            outputs.append(self._append(chunk, result, now))
        elif chunk.completes:
            output = self._output(sequence)
            output.pooled = result.pooled
            if not output.is_empty:
                sequence.times.first_token = sequence.times.last_token = now
            self._finish(sequence, output, "length" if output.is_empty else "stop")
            outputs.append(output)

    def _keep_prompt_logprobs(self, chunk: ScheduledChunk, logprobs: list[TokenLogprobs]) -> None:
        sequence = chunk.sequence
        if chunk.first == 0:
            sequence.prompt_logprobs = [None]
        if sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.num_prompt:
            sequence.prompt_logprobs += logprobs

    def _append(self, chunk: ScheduledChunk, result: ChunkResult, now: float) -> TokenOutput:
        """Continue the sequence of ``chunk`` with the sampled tokens, up to one that ends it."""
        sequence, times, tokens = chunk.sequence, chunk.sequence.times, result.sampled
        if times.first_token is None:
            times.first_token = now
        times.last_token = now
        reason: str | None = None
        stop_reason: int | str | None = None
        count = 0
        while reason is None and count < len(tokens):
            sequence.token_ids.append(tokens[count].token)
            reason, stop_reason = sequence.finish_reason(tokens[count].token, tokens[count].ends)
            count += 1
        num_drafts = len(chunk.drafts)
        if num_drafts:
            chunk.accept(count - 1)
            self._drafts = self._drafts.copy()
            self._drafts.observe(num_drafts, count - 1)
        for extension in self.scheduler.extensions:
            extension.commit(chunk, result, num_drafts)
        self.scheduler.insert_pages(chunk)
        sequence.is_steady = sequence.may_be_steady
        output = self._output(sequence)
        taken = tokens[:count]
        output.token_ids = [sampled.token for sampled in taken]
        output.token_logprobs = [sampled.logprob for sampled in taken]
        if taken[0].logprobs is not None:
            output.logprobs = [sampled.logprobs for sampled in taken if sampled.logprobs is not None]
        if reason is not None:
            self._finish(sequence, output, reason)
            output.stop_reason = stop_reason
        return output

    def _output(self, sequence: Sequence) -> TokenOutput:
        """An output of ``sequence`` without tokens; the first one carries the prompt's log-probabilities."""
        output = TokenOutput(
            request_id=sequence.id,
            num_cached_tokens=sequence.num_cached or 0,
            num_preemptions=sequence.num_preemptions,
            times=sequence.times,
        )
        if sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) == sequence.num_prompt:
            if sequence.num_outputs <= 1:
                output.prompt_logprobs = sequence.prompt_logprobs
        return output

    def _fail(self, sequence: Sequence, reason: str, outputs: list[TokenOutput]) -> None:
        output = self._output(sequence)
        output.error = reason
        self._finish(sequence, output, "error")
        outputs.append(output)

    def _finish(self, sequence: Sequence, output: TokenOutput, reason: str) -> None:
        output.finish_reason = reason
        sequence.drop_pending()
        self.scheduler.remove(sequence)
        del self._sequences[sequence.id]

    def _count(self, num_scheduled: int, outputs: list[TokenOutput]) -> None:
        """Refresh ``stats`` after a step of ``num_scheduled`` tokens."""
        old, scheduler = self.stats, self.scheduler
        self.stats = EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_deferred=scheduler.num_deferred,
            num_pages=scheduler.pool.num_usable,
            num_free_pages=scheduler.pool.num_free,
            num_scheduled_tokens=num_scheduled,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=old.generation_tokens
            + sum(len(output.token_ids) for output in outputs)
            + len(self._continued.token_ids),
            steps=old.steps + bool(num_scheduled),
            num_clients=len(scheduler.clients),
            drafts=self._drafts,
        )


def _halves(chunks: list[ScheduledChunk]) -> list[list[ScheduledChunk]]:
    """``chunks``, at least two, cut where about half of the tokens are on either side."""
    tokens = list(itertools.accumulate(chunk.count for chunk in chunks))
    cut = min(1 + bisect.bisect_left(tokens, tokens[-1] // 2), len(chunks) - 1)
    return [chunks[:cut], chunks[cut:]]
