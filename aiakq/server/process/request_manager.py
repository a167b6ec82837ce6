"""RequestManager: a bounded queue in front of the engine, and the routing of outputs to request streams."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.command import Abort, Command
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import EngineStats, StepOutput
from aiakq.runtime.protocol.request import Request, RequestSpec
from aiakq.runtime.text.output_processor import Delta, OutputProcessor
from aiakq.server.errors import copy_error
from aiakq.server.process.adapter_calls import AdapterCalls
from aiakq.server.process.ipc import GiveVocabulary, Submit, ToEngine
from aiakq.server.process.lost_adapters import AdapterVersions, LostAdapters
from aiakq.server.process.queue_limits import QueueLimits
from aiakq.server.process.request_stream import (
    RequestStream,
    SequenceProgress,
    check_prompt_logprobs,
    check_sequence_count,
    merge_deltas,
)
from aiakq.server.process.sequence_errors import sequence_error
from aiakq.server.telemetry.metrics import Metrics

logger = logging.getLogger("aiakq.server")


@dataclass
class _PromptState:
    """The sequences generated for one prompt, by their ids in the engine.

    num_returned  number of sequences to return: the best, if more are generated.
    candidates    output so far, if only the best sequences are returned.
    """

    stream: RequestStream
    index: int
    sequences: dict[str, SequenceProgress]
    num_unfinished: int
    num_returned: int
    candidates: dict[int, Delta] = field(default_factory=dict)


class RequestManager:
    """All requests to one engine; only this class sends sequences to it.

    adapters        calls of the engine about LoRA adapters.
    stats           statistics of the engine after its last step.
    failure         why requests cannot be served now; None while the engine is running.
    num_unfinished  number of unfinished sequences; while there are any, the engine must run steps.
    """

    def __init__(self, processor: OutputProcessor, limits: ModelLimits, metrics: Metrics, queue: QueueLimits) -> None:
        self.adapters = AdapterCalls()
        self.prefetch_adapter = self.adapters.prefetch
        self.stats = EngineStats(num_pages=0)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.failure: AiakqError | None = error("loading")
        self.num_unfinished = 0
        self.vocabulary = b""
        self._processor = processor
        self._limits = limits
        self._metrics = metrics
        self._queue = queue
        self._send: Callable[[ToEngine], None] = _discard
        self._streams: dict[RequestStream, None] = {}  # in order of arrival
        self._prompts: dict[str, _PromptState] = {}
        self._prompt_of_sequence: dict[str, _PromptState] = {}
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._had_engine = False
        self._lost = LostAdapters(self.adopt)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of prompt tokens of sequences that wait for their first step."""
        return self._num_waiting_tokens

    # --- requests

    def start(self, request: Request) -> RequestStream:
        """Admit a request and send its sequences to the engine.

        Raises too_many_prompts, value_out_of_range, overloaded, ``failure``, and everything ``messages.admit`` raises.
        If it raises, no part of the request was started.
        """
        if self.failure is not None:
            raise copy_error(self.failure)
        prompts, params = request.prompts, request.params
        check_sequence_count(len(prompts), params)
        check_prompt_logprobs(prompts, params, self._limits.vocab_size)
        self._queue.check(prompts, params, self.num_unfinished, self._num_waiting, self._num_waiting_tokens)
        stream = RequestStream(request, self._on_close)
        specs = self._add(stream)
        self._streams[stream] = None
        self._metrics.params_n.observe(params.n)
        self._send(Submit.of(specs))
        return stream

    def expire(self, now: float) -> None:
        """Fail requests that have waited or run for too long; ``now`` is on ``time.monotonic``."""
        queue = self._queue
        for stream in list(self._streams):
            age = now - stream.request.arrival_time
            if age > queue.max_request_seconds:
                stream.fail(error("time_limit", limit=queue.max_request_seconds))
            elif age > queue.max_wait_seconds and stream.is_waiting:
                stream.fail(error("queue_timeout", limit=queue.max_wait_seconds))
        self._lost.update(now)

    def fail_all(self, failure: AiakqError) -> None:
        """Fail every running request."""
        for stream in list(self._streams):
            stream.fail(failure)

    def abort(self, ids: Sequence[str] | None, failure: AiakqError) -> int:
        """Fail the running requests with these ids, or all of them for None; return their number."""
        streams = [stream for stream in self._streams if ids is None or stream.request.id in ids]
        for stream in streams:
            stream.fail(failure)
        return len(streams)

    def adapters_of_requests(self) -> tuple[list[str], list[str]]:
        """Names of the LoRA adapters of running requests, and of waiting ones that do not run."""
        names: dict[RequestStream, str] = {}
        for stream in self._streams:
            adapter = stream.request.options.adapter
            if adapter is not None and not stream.is_complete:
                names[stream] = adapter.name
        running = {name for stream, name in names.items() if not stream.is_waiting}
        return sorted(running), sorted({*names.values()} - running)

    def use_adapters(self, versions: AdapterVersions) -> None:
        """Set the adapters that requests may name."""
        self._lost.versions = versions

    def send(self, command: Command) -> None:
        """Have the engine carry out a command. An engine that is restarted later does not know it."""
        self._send(command)

    def _on_close(self, stream: RequestStream) -> None:
        """Handle the end of a request: cancel its unfinished sequences."""
        self._streams.pop(stream, None)
        self._lost.discard(stream)
        self._metrics.max_num_generation_tokens.observe(stream.max_generated)
        self._cancel(stream)

    def _add(self, stream: RequestStream) -> list[RequestSpec]:
        """Register the sequences of ``stream``; return them for the engine."""
        request, specs = stream.request, list[RequestSpec]()
        try:
            for index, (prompt_id, prompt) in enumerate(zip(stream.prompt_ids, request.prompts, strict=True)):
                prompt_specs = self._processor.add(prompt_id, prompt, request, stream.key)
                states = stream.sequences[index]
                if not states:
                    states += [SequenceProgress(len(prompt.token_ids), spec.max_tokens) for spec in prompt_specs]
                sequences = {spec.request_id: state for spec, state in zip(prompt_specs, states, strict=True)}
                entry = _PromptState(stream, index, sequences, len(prompt_specs), request.params.n)
                self._prompts[prompt_id] = entry
                self._prompt_of_sequence.update(dict.fromkeys(sequences, entry))
                stream.num_unfinished += len(prompt_specs)
                stream.restarting = False
                self.num_unfinished += len(prompt_specs)
                self._num_waiting += len(prompt_specs)
                self._num_waiting_tokens += len(prompt.token_ids) * len(prompt_specs)
                specs += prompt_specs
        except AiakqError:
            self._remove(stream)
            raise
        return specs

    def _remove(self, stream: RequestStream) -> list[str]:
        """Unregister the sequences of ``stream``; return the engine's ids of the unfinished ones."""
        unfinished: list[str] = []
        for prompt_id in stream.prompt_ids:
            entry = self._remove_prompt(prompt_id)
            if entry is not None:
                for sequence in entry.sequences.values():
                    self._on_scheduled(sequence)
                    self.num_unfinished -= not sequence.finished
                unfinished += self._processor.cancel(prompt_id)
        return unfinished

    def _cancel(self, stream: RequestStream) -> None:
        """Unregister the sequences of ``stream``, and have the engine abort the unfinished ones."""
        unfinished = self._remove(stream)
        if unfinished:
            self._send(Abort(unfinished))

    def _remove_prompt(self, prompt_id: str) -> _PromptState | None:
        entry = self._prompts.pop(prompt_id, None)
        for sequence_id in entry.sequences if entry else ():
            del self._prompt_of_sequence[sequence_id]
        return entry

    def _on_scheduled(self, sequence: SequenceProgress) -> None:
        """Record that ``sequence`` has left the queue."""
        if not sequence.scheduled:
            sequence.scheduled = True
            self._num_waiting -= 1
            self._num_waiting_tokens -= sequence.num_prompt_tokens

    # --- the engine

    def on_engine_ready(self, send: Callable[[ToEngine], None], limits: ModelLimits) -> None:
        """Handle the start of a new engine: send it the requests that its predecessor left unfinished."""
        if self._had_engine:
            self._metrics.engine_restarts.inc()
        self._had_engine = True
        self.failure = None
        self._send = self.adapters.send = send
        self._limits = self._processor.limits = limits
        if self.vocabulary:
            send(GiveVocabulary(self.vocabulary))
        for stream in list(self._streams):
            if not stream.is_complete:
                self.adopt(stream)

    def on_engine_end(self, running_error: AiakqError, new_request_error: AiakqError, *, replay: bool) -> None:
        """Handle the end of the engine.

        running_error      fails running requests that cannot be replayed.
        new_request_error  fails new requests until ``on_engine_ready``.
        replay             keep requests whose readers have received no output, for the next engine. A request that was
                           running when two engines ended may be the cause, and is not given to a third; nor is one that
                           two engines had received when they ended without running any.
        """
        has_running = any(not stream.is_complete and not stream.is_waiting for stream in self._streams)
        self.failure = new_request_error
        self._send = _discard
        self.adapters.on_engine_end(new_request_error)
        self._metrics.engine_ended()
        self.stats = EngineStats(num_pages=0)
        for stream in list(self._streams):
            self._lost.discard(stream)
            if stream.is_complete:  # all output is available
                continue
            # A request that is restarting had not been sent to this engine, which was still loading.
            may_be_cause = not stream.is_waiting or not (has_running or stream.restarting)
            stream.num_engine_ends += may_be_cause
            if replay and not stream.consumed and stream.num_engine_ends < 2:
                self._remove(stream)
                stream.restart()
            else:
                quarantined = stream.num_engine_ends >= 2 and not stream.consumed
                stream.fail(error("request_quarantined") if quarantined else running_error)

    def take_restarting(self) -> list[RequestStream]:
        """Remove and return the requests that wait for the next engine, so that another manager can adopt them."""
        streams = [stream for stream in self._streams if stream.restarting]
        for stream in streams:
            del self._streams[stream]
        return streams

    def adopt(self, stream: RequestStream) -> None:
        """Restart a request that another engine left unfinished."""
        stream.move(self._on_close)
        self._streams[stream] = None
        try:
            specs = self._add(stream)
        except AiakqError as failure:  # this engine may have a smaller page pool
            stream.fail(failure)
        else:
            self._send(Submit.of(specs))

    def on_start(self, sequence_ids: list[str]) -> None:
        """Record that these sequences start in the current step."""
        for sequence_id in sequence_ids:
            entry = self._prompt_of_sequence.get(sequence_id)
            if entry is not None:
                self._on_scheduled(entry.sequences[sequence_id])

    def on_step(self, output: StepOutput) -> None:
        """Route the output of one engine step to the requests it belongs to."""
        now = time.monotonic()
        self.stats = output.stats
        self._metrics.step(output.stats)
        stopped: list[str] = []
        for token_output in output.all_outputs():
            try:
                deltas, to_abort = self._processor.process(token_output)
            except BaseException as failure:  # panics of the Rust tokenizer do not derive from Exception
                logger.exception("detokenizing %s failed", token_output.request_id, exc_info=failure)
                self._fail_sequence(token_output.request_id)
                continue
            stopped += to_abort
            for delta in deltas:
                self._deliver(token_output.request_id, delta, now)
        if stopped:
            self._send(Abort(stopped))

    def _fail_sequence(self, sequence_id: str) -> None:
        """Fail the request of a sequence whose text could not be produced."""
        entry = self._prompt_of_sequence.get(sequence_id)
        if entry is not None:
            entry.stream.fail(error("request_failed", reason="its tokens could not be turned into text"))

    def _deliver(self, sequence_id: str, delta: Delta, now: float) -> None:
        """Pass ``delta`` on to its stream; with best_of, only once all sequences of the prompt are finished."""
        entry = self._prompt_of_sequence.get(sequence_id)
        if entry is None:  # the request was closed in the meantime
            return
        if delta.error is not None and self._keeps_lost(entry.stream, delta.error):
            return
        sequence = entry.sequences[sequence_id]
        self._observe(entry.stream, sequence, delta, now)
        if delta.finish_reason == "error":
            entry.stream.fail(sequence_error(delta.error or "no reason is known"))
            return
        if delta.finish_reason == "abort":
            entry.stream.fail(error("request_failed", reason="the engine stopped it"))
            return
        if delta.finish_reason is not None:
            sequence.finished = True
            self.num_unfinished -= 1
            entry.num_unfinished -= 1
            entry.stream.num_unfinished -= 1
            if entry.num_unfinished == 0:
                self._remove_prompt(delta.request_id)
        if len(entry.sequences) == entry.num_returned:
            entry.stream.put(entry.index, delta)
            return
        candidate = entry.candidates.get(delta.index)
        entry.candidates[delta.index] = delta if candidate is None else merge_deltas(candidate, delta)
        if entry.num_unfinished == 0:
            ranked = sorted(entry.candidates.values(), key=lambda candidate: -candidate.cumulative_logprob)
            for index, best in enumerate(ranked[: entry.num_returned]):
                entry.stream.put(entry.index, replace(best, index=index))

    def _keeps_lost(self, stream: RequestStream, reason: str) -> bool:
        """Whether a request, of which the engine has failed a sequence, waits for the next version of its adapter."""
        failure = sequence_error(reason)
        if failure.id != "adapter_lost" or not self._lost.keeps(stream):
            return False
        self._cancel(stream)
        stream.restart(with_new_ids=True)
        self._lost.add(stream, failure)
        return True

    def _observe(self, stream: RequestStream, sequence: SequenceProgress, delta: Delta, now: float) -> None:
        """Update the metrics with one delta."""
        metrics = self._metrics
        sequence.num_generated += len(delta.token_ids)
        num_new = sequence.num_generated - sequence.num_counted
        sequence.num_cached_tokens = max(sequence.num_cached_tokens, delta.num_cached_tokens)
        if not sequence.first_token_time:
            self.num_prompt_tokens += sequence.num_prompt_tokens
            metrics.prompt_tokens.inc(sequence.num_prompt_tokens)
            metrics.prompt_tokens_cached.inc(delta.num_cached_tokens)
            if delta.token_ids:
                metrics.time_to_first_token.observe(now - stream.request.arrival_time)
            sequence.first_token_time = sequence.last_token_time = now
        elif num_new > 0:
            metrics.inter_token_latency.observe(now - sequence.last_token_time)
        if num_new > 0:
            sequence.last_token_time = now
            sequence.num_counted = sequence.num_generated
            self.num_generation_tokens += num_new
            metrics.generation_tokens.inc(num_new)
        stream.max_generated = max(stream.max_generated, sequence.num_generated)
        if delta.finish_reason is None:
            return
        sequence.finish_reason, sequence.num_preemptions = delta.finish_reason, delta.num_preemptions
        sequence.times = delta.times
        if sequence.num_generated > 1:
            seconds = sequence.last_token_time - sequence.first_token_time
            for histogram in metrics.time_per_output_token:
                histogram.observe(seconds / (sequence.num_generated - 1))
        metrics.sequence_ended(
            sequence.num_prompt_tokens,
            sequence.num_generated,
            sequence.max_tokens,
            delta.num_preemptions,
            delta.times,
        )


def _discard(record: ToEngine) -> None:
    """Drop a record, because no engine is running."""
