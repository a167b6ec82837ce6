"""Engine and request manager as hypothesis state machines, which search for short ways to break them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from fake_executor import EngineDied, Fault, PagedExecutor
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_model import NUM_STOP_TOKENS, VOCAB, ReferenceRequest
from simulation import Simulation
from simulation_config import SimulationConfig
from simulator import FAULT_KINDS

from aiakq.errors import AiakqError, error
from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.command import Abort, Inbox, ResetPrefixCache
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.request import Prompt, Request
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import OutputProcessor
from aiakq.runtime.text.tokenizer import NoTokenizer
from aiakq.server.process.ipc import Submit, ToEngine
from aiakq.server.process.queue_limits import QueueLimits
from aiakq.server.process.request_manager import RequestManager
from aiakq.server.process.request_stream import RequestDeltas, RequestStream
from aiakq.server.telemetry.metrics import Metrics

#: Of few tokens, so that prompts share prefixes.
PROMPTS = st.lists(st.sampled_from([NUM_STOP_TOKENS, NUM_STOP_TOKENS + 1, VOCAB - 1]), min_size=1, max_size=11)


class EngineMachine(RuleBasedStateMachine):
    """Requests, aborts and resets are put into an inbox, and steps with and without faults take it."""

    @initialize(rng=st.randoms(use_true_random=False))
    def begin(self, rng):
        self.simulation = Simulation(SimulationConfig.sample(rng))
        self.inbox: Inbox = []

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(0, 12),
        count=st.integers(1, 3),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "a"]),
        prompt_logprobs=st.booleans(),
        stops=st.booleans(),
    )
    def add_request(self, prompt, max_tokens, count, priority, salt, prompt_logprobs, stops):
        prompt = prompt[: self.simulation.config.max_len - 1]
        params = SamplingParams(
            max_tokens=min(max_tokens, self.simulation.config.max_len - len(prompt)),
            seed=0,
            prompt_logprobs=0 if prompt_logprobs else None,
            ignore_eos=not stops,
            stop_token_ids=list(range(1, NUM_STOP_TOKENS)) if stops else None,
        )
        self.inbox += self.simulation.add_request(prompt, params, count, priority, cache_salt=salt)

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.inbox.append(Abort([data.draw(st.sampled_from([*self.simulation.requests, "unknown"]))]))

    @rule()
    def abort_all(self):
        self.simulation.step(self.inbox, None)
        self.inbox = []
        self.simulation.abort_all()

    @rule()
    def reset(self):
        self.inbox.insert(0, ResetPrefixCache())

    @rule(seconds=st.sampled_from([0.0, 0.01, 100.0]))
    def wait(self, seconds):
        self.simulation.now += seconds

    @rule(
        count=st.integers(1, 4),
        kind=st.sampled_from([*[None] * 3, *dict.fromkeys(FAULT_KINDS)]),
        position=st.floats(0, 1, exclude_max=True),
    )
    def step(self, count, kind, position):
        inbox, self.inbox = self.inbox, []
        for _ in range(count):
            self.simulation.step(inbox, Fault(kind, position) if kind else None)
            inbox, kind = [], None

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.step(self.inbox, None)
            self.simulation.finish()


@dataclass(eq=False)
class Reader:
    """A reader of a stream, and by choice the tokens and finish reason that it has received."""

    stream: RequestStream
    deltas: object
    token_ids: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    finish_reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    failure: AiakqError | None = None
    done: bool = False


class ManagerMachine(RuleBasedStateMachine):
    """The request manager with an engine that dies and is restarted: readers start, read, stall and disconnect."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.limits = ModelLimits(VOCAB, 24, 1 << 20, by_priority=True)
        queue = QueueLimits(
            max_running=4, max_waiting=6, max_waiting_tokens=60, max_wait_seconds=50, max_request_seconds=100
        )
        self.metrics = Metrics("m", 24, {"block_size": "4"})
        self.processor = OutputProcessor(NoTokenizer(), self.limits)
        self.manager = RequestManager(self.processor, self.limits, self.metrics, queue)
        self.readers: list[Reader] = []
        self.inbox: Inbox = []
        self.number = 0
        self.now = 0.0
        self.engine: Engine | None = None
        self.engine_starts()

    def teardown(self):
        for _ in range(2000):
            if self.engine is None:  # a fault of the previous step may also end it here
                self.engine_starts()
            if not self.engine.has_work() and not self.inbox:
                break
            self.step(1)
        for reader in self.readers:
            self.read(reader)
        assert all(reader.done for reader in self.readers), "every request has a response or an error"
        assert self.engine.stats.num_free_pages == self.engine.stats.num_pages
        self.loop.close()

    # --- the engine

    @precondition(lambda self: self.engine is None)
    @rule(ahead=st.booleans())
    def engine_starts(self, ahead=False):
        self.executor = PagedExecutor(14, 4)
        scheduler = Scheduler(PagePool(14, 4), SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))
        self.engine = Engine(self.executor, scheduler, self.limits, {}, 2 if ahead else 1)
        self.engine.on_start = self.manager.on_start
        self.inbox = []
        self.manager.on_engine_ready(self.receive, self.limits)

    @precondition(lambda self: self.engine is not None)
    @rule(replay=st.sampled_from([True, True, True, False]), restart=st.booleans())
    def engine_ends(self, replay, restart=False):
        self.engine = None
        reason = "it was ended by SIGKILL"
        failure, unavailable = error("engine_restarted", reason=reason), error("engine_restarting", reason=reason)
        self.manager.on_engine_end(failure, unavailable, replay=replay)
        if restart:
            self.engine_starts()

    @precondition(lambda self: self.engine is not None)
    @rule(count=st.integers(1, 6), kind=st.sampled_from([*[None] * 4, "nan_row", "nan_cache", "engine_death"]))
    def steps(self, count, kind):
        for _ in range(count):
            if self.engine is not None and (self.engine.has_work() or self.inbox):
                self.step(1, kind)
                kind = None

    def step(self, seconds: float, kind: str | None = None) -> None:
        inbox, self.inbox = self.inbox, []
        self.now += seconds
        self.executor.begin(Fault(kind, 0.5) if kind else None)
        try:
            output = self.engine.step(self.now, inbox)
        except EngineDied:
            self.engine_ends(True)
            return
        self.engine.check()
        self.manager.on_step(output)

    def receive(self, record: ToEngine) -> None:
        """Put a message into the inbox, as the engine process does."""
        assert self.engine is not None
        if isinstance(record, Submit):
            self.inbox += record.specs()
        elif isinstance(record, (Abort, ResetPrefixCache)):
            self.inbox.append(record)

    # --- the readers

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=2),
        n=st.integers(1, 2),
        num_discarded=st.integers(0, 1),
        max_tokens=st.sampled_from([0, 1, 4, 8, 13]),
        final_only=st.booleans(),
    )
    def start(self, prompts, n, num_discarded, max_tokens, final_only):
        best_of = n + num_discarded if final_only and max_tokens else n
        params = SamplingParams(n=n, best_of=best_of, max_tokens=max_tokens, seed=4, temperature=1.0)
        self.number += 1
        request = Request(
            f"q{self.number}",
            [Prompt(None, prompt) for prompt in prompts],
            params,
            arrival_time=self.now,
            final_only=final_only,
        )
        try:
            stream = self.manager.start(request)
        except AiakqError as failure:
            assert failure.id == ("overloaded" if self.engine is not None else "engine_restarting")
            return
        self.readers.append(Reader(stream, aiter(stream)))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read_one(self, data):
        self.read(data.draw(st.sampled_from(self.readers)))

    def read(self, reader: Reader) -> None:
        """Read all available output."""
        deltas = None
        while not reader.done and deltas != []:
            try:
                deltas = self.loop.run_until_complete(self.next_deltas(reader))
            except StopAsyncIteration:
                reader.done = True
            except AiakqError as failure:
                reader.done, reader.failure = True, failure
            else:
                self.record(reader, deltas)
                continue
            reader.stream.close()
            self.check_response(reader)

    async def next_deltas(self, reader: Reader) -> list:
        """Return the next output; an empty list if there is none yet."""
        task = asyncio.ensure_future(anext(reader.deltas))
        for _ in range(3):
            await asyncio.sleep(0)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        reader.deltas = aiter(reader.stream)
        return []

    def record(self, reader: Reader, deltas: RequestDeltas) -> None:
        for prompt_index, delta in deltas:
            key = prompt_index, delta.index
            assert key not in reader.finish_reasons, "output after the finish reason"
            reader.token_ids.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                reader.finish_reasons[key] = delta.finish_reason

    def check_response(self, reader: Reader) -> None:
        params = reader.stream.request.params
        for prompt_index, prompt in enumerate(reader.stream.request.prompts):
            expected = [self.expected(prompt.token_ids, params, index) for index in range(params.num_sequences)]
            for index in range(params.n):
                found = reader.token_ids.get((prompt_index, index), [])
                if params.num_sequences > params.n:
                    assert not found or found in expected
                else:
                    assert found == expected[index][: len(found)]
                if reader.failure is None:
                    assert reader.finish_reasons[prompt_index, index] in ("length", "stop")
                    assert found in expected, "a response is cut short without an error"

    def expected(self, prompt: list[int], params: SamplingParams, index: int) -> list[int]:
        reference = ReferenceRequest(admit("reference", prompt, params, self.limits, index))
        return [reference.next()[0] for _ in range(reference.spec.max_tokens)]

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), event=st.sampled_from(["disconnect", "disconnect", "second", "minute", "operator"]))
    def event(self, data, event):
        if event == "disconnect":
            reader = data.draw(st.sampled_from(self.readers))
            reader.stream.close()
            reader.done = True
        elif event == "operator":
            ids = data.draw(st.sampled_from([["q1"], ["q2", "q3"], ["unknown"]]))
            self.manager.abort(ids, error("aborted"))
            self.manager.send(ResetPrefixCache())
        else:
            self.now += 60.0 if event == "minute" else 1.0
            self.manager.expire(self.now)

    # --- invariants

    @invariant()
    def counters_are_exact(self):
        manager = self.manager
        sequences = [one for part in manager._prompts.values() for one in part.sequences.values()]
        assert manager.num_unfinished == sum(not one.finished for one in sequences)
        waiting = [one for one in sequences if not one.scheduled]
        assert manager._num_waiting == len(waiting)
        assert manager._num_waiting_tokens == sum(one.num_prompt_tokens for one in waiting)
        assert manager._prompt_of_sequence.keys() == {id for part in manager._prompts.values() for id in part.sequences}
        unfinished = {
            id for part in manager._prompts.values() for id, one in part.sequences.items() if not one.finished
        }
        assert self.processor._streams.keys() == unfinished
        if self.engine is None:
            assert not sequences, "sequences are registered although there is no engine"
        else:
            sent = {one.request_id for one in self.inbox if not isinstance(one, (Abort, ResetPrefixCache))}
            aborted = {id for one in self.inbox if isinstance(one, Abort) for id in one.request_ids}
            assert unfinished == (self.engine._sequences.keys() | sent) - aborted
        streams = set(manager._streams)
        assert all(reader.done or reader.stream in streams or reader.stream.failure for reader in self.readers)


@pytest.mark.parametrize("steps, complete", [(2, False), (9, True)])
@pytest.mark.parametrize("final_only", [False, True])
def test_output_that_is_unread_when_the_engine_ends(steps, complete, final_only):
    """Regression: a reader that had been woken took discarded output for an empty response."""
    machine = ManagerMachine()
    machine.start([[NUM_STOP_TOKENS, NUM_STOP_TOKENS + 1]], n=1, num_discarded=0, max_tokens=4, final_only=final_only)
    machine.steps(steps, None)
    machine.engine_ends(replay=True)
    (reader,) = machine.readers
    machine.read(reader)
    assert reader.done == complete, "a complete response needs no engine, others wait for one"
    machine.teardown()
    assert reader.failure is None and len(reader.token_ids[0, 0]) == 4


# Derandomized: every run makes the same search, so that a failure is reproducible.
TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(stateful_step_count=50)
TestManager = ManagerMachine.TestCase
TestManager.settings = settings(stateful_step_count=50)
