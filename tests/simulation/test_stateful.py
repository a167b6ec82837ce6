"""Engine and queue as state machines that hypothesis drives, in search of a short way to break them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model import ENDS, VOCAB, Alone, Died, Fault, PagedExecutor
from sizes import Setup
from world import World

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

#: A few tokens, so that prompts begin alike.
PROMPTS = st.lists(st.sampled_from([ENDS, ENDS + 1, VOCAB - 1]), min_size=1, max_size=11)


class EngineMachine(RuleBasedStateMachine):
    """Requests, aborts and resets gather in an inbox until a step, with or without a fault, takes them."""

    @initialize(draw=st.randoms(use_true_random=False))
    def begin(self, draw):
        self.world = World(Setup.drawn(draw))
        self.inbox: Inbox = []

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(0, 12),
        count=st.integers(1, 3),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "a"]),
        scored=st.booleans(),
        ends=st.booleans(),
    )
    def ask(self, prompt, max_tokens, count, priority, salt, scored, ends):
        prompt = prompt[: self.world.setup.max_len - 1]
        params = SamplingParams(
            max_tokens=min(max_tokens, self.world.setup.max_len - len(prompt)),
            seed=0,
            prompt_logprobs=0 if scored else None,
            ignore_eos=not ends,
            stop_token_ids=list(range(1, ENDS)) if ends else None,
        )
        self.inbox += self.world.ask(prompt, params, count, priority, salt)

    @precondition(lambda self: self.world.clients)
    @rule(data=st.data())
    def abort(self, data):
        self.inbox.append(Abort([data.draw(st.sampled_from([*self.world.clients, "unknown"]))]))

    @rule()
    def abort_all(self):
        self.world.step(self.inbox, None)
        self.inbox = []
        self.world.abort_all()

    @rule()
    def reset(self):
        self.inbox.insert(0, ResetPrefixCache())

    @rule(seconds=st.sampled_from([0.0, 0.01, 100.0]))
    def wait(self, seconds):
        self.world.now += seconds

    @rule(
        count=st.integers(1, 4),
        kind=st.sampled_from([None, None, None, "row", "nothing", "poison", "all", "memory", "dies", "broken"]),
        place=st.floats(0, 1, exclude_max=True),
    )
    def step(self, count, kind, place):
        inbox, self.inbox = self.inbox, []
        for _ in range(count):
            self.world.step(inbox, Fault(kind, place) if kind else None)
            inbox, kind = [], None

    def teardown(self):
        if hasattr(self, "world"):
            self.world.step(self.inbox, None)
            self.world.finish()


@dataclass(eq=False)
class Reader:
    """The reader of a stream, and what it has received: per choice its tokens and how it ended."""

    stream: RequestStream
    deltas: object
    got: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[int, int], str] = field(default_factory=dict)
    failure: AiakqError | None = None
    done: bool = False


class ManagerMachine(RuleBasedStateMachine):
    """The server's queue in front of an engine that dies and comes back: readers come, read, stall and leave."""

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
            if self.engine is None:  # also if it ends only now, of a fault in the step before
                self.engine_starts()
            if not self.engine.has_work() and not self.inbox:
                break
            self.step(1)
        for reader in self.readers:
            self.read(reader)
        assert all(reader.done for reader in self.readers), "everybody is answered or told why not"
        assert self.engine.stats.num_free_pages == self.engine.stats.num_pages
        self.loop.close()

    # --- the engine

    @precondition(lambda self: self.engine is None)
    @rule(ahead=st.booleans())
    def engine_starts(self, ahead=False):
        self.model = PagedExecutor(14, 4)
        scheduler = Scheduler(PagePool(14, 4), SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))
        self.engine = Engine(self.model, scheduler, self.limits, {}, 2 if ahead else 1)
        self.engine.on_start = self.manager.on_start
        self.inbox = []
        self.manager.on_engine_ready(self.hear, self.limits)

    @precondition(lambda self: self.engine is not None)
    @rule(replay=st.sampled_from([True, True, True, False]), again=st.booleans())
    def engine_ends(self, replay, again=False):
        self.engine = None
        gone = error("engine_restarted", reason="it was ended by SIGKILL")
        self.manager.on_engine_end(gone, error("engine_restarting", reason="it was ended by SIGKILL"), replay=replay)
        if again:
            self.engine_starts()

    @precondition(lambda self: self.engine is not None)
    @rule(count=st.integers(1, 6), kind=st.sampled_from([None, None, None, None, "row", "poison", "dies"]))
    def steps(self, count, kind):
        for _ in range(count):
            if self.engine is not None and (self.engine.has_work() or self.inbox):
                self.step(1, kind)
                kind = None

    def step(self, seconds: float, kind: str | None = None) -> None:
        inbox, self.inbox = self.inbox, []
        self.now += seconds
        self.model.begin(Fault(kind, 0.5) if kind else None)
        try:
            output = self.engine.step(self.now, inbox)
        except Died:
            self.engine_ends(True)
            return
        self.engine.check()
        self.manager.on_step(output)

    def hear(self, record: ToEngine) -> None:
        """As the engine's process takes what it is sent."""
        assert self.engine is not None
        if isinstance(record, Submit):
            self.inbox += record.specs()
        elif isinstance(record, (Abort, ResetPrefixCache)):
            self.inbox.append(record)

    # --- the readers

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=2),
        n=st.integers(1, 2),
        more=st.integers(0, 1),
        max_tokens=st.sampled_from([0, 1, 4, 8, 13]),
        whole=st.booleans(),
    )
    def ask(self, prompts, n, more, max_tokens, whole):
        best_of = n + more if whole and max_tokens else n
        params = SamplingParams(n=n, best_of=best_of, max_tokens=max_tokens, seed=4, temperature=1.0)
        self.number += 1
        given = [Prompt(None, prompt) for prompt in prompts]
        try:
            stream = self.manager.start(
                Request(f"q{self.number}", given, params, arrival_time=self.now, final_only=whole)
            )
        except AiakqError as refusal:
            assert refusal.id == ("overloaded" if self.engine is not None else "engine_restarting")
            return
        self.readers.append(Reader(stream, aiter(stream)))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read_one(self, data):
        self.read(data.draw(st.sampled_from(self.readers)))

    def read(self, reader: Reader) -> None:
        """Read everything that has arrived for a reader."""
        deltas = None
        while not reader.done and deltas != []:
            try:
                deltas = self.loop.run_until_complete(self.next_of(reader))
            except StopAsyncIteration:
                reader.done = True
            except AiakqError as failure:
                reader.done, reader.failure = True, failure
            else:
                self.take(reader, deltas)
                continue
            reader.stream.close()
            self.check_answer(reader)

    async def next_of(self, reader: Reader) -> list:
        """The next output; none if the stream was woken but has nothing to return yet."""
        task = asyncio.ensure_future(anext(reader.deltas))
        for _ in range(3):
            await asyncio.sleep(0)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        reader.deltas = aiter(reader.stream)
        return []

    def take(self, reader: Reader, deltas: RequestDeltas) -> None:
        for prompt_index, delta in deltas:
            key = prompt_index, delta.index
            assert key not in reader.ends, "output after the end"
            reader.got.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                reader.ends[key] = delta.finish_reason

    def check_answer(self, reader: Reader) -> None:
        params = reader.stream.request.params
        for prompt_index, prompt in enumerate(reader.stream.request.prompts):
            alone = [self.alone(prompt.token_ids, params, index) for index in range(params.num_sequences)]
            for index in range(params.n):
                found = reader.got.get((prompt_index, index), [])
                if params.num_sequences > params.n:
                    assert not found or found in alone
                else:
                    assert found == alone[index][: len(found)]
                if reader.failure is None:
                    assert reader.ends[prompt_index, index] in ("length", "stop")
                    assert found in alone, "an answer is cut short and nobody was told"

    def alone(self, prompt: list[int], params: SamplingParams, index: int) -> list[int]:
        alone = Alone(admit("alone", prompt, params, self.limits, index))
        return [alone.next()[0] for _ in range(alone.spec.max_tokens)]

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), what=st.sampled_from(["leaves", "leaves", "a little later", "much later", "operator"]))
    def something_happens(self, data, what):
        if what == "leaves":
            reader = data.draw(st.sampled_from(self.readers))
            reader.stream.close()
            reader.done = True
        elif what == "operator":
            ids = data.draw(st.sampled_from([["q1"], ["q2", "q3"], ["unknown"]]))
            self.manager.abort(ids, error("aborted"))
            self.manager.reset_prefix_cache()
        else:
            self.now += 60.0 if what == "much later" else 1.0
            self.manager.expire(self.now)

    # --- what must hold

    @invariant()
    def counts_are_exact(self):
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
            assert not sequences, "while there is no engine, no sequence is registered"
        else:
            sent = {one.request_id for one in self.inbox if not isinstance(one, (Abort, ResetPrefixCache))}
            stopped = {id for one in self.inbox if isinstance(one, Abort) for id in one.request_ids}
            assert unfinished == (self.engine._sequences.keys() | sent) - stopped
        streams = set(manager._streams)
        assert all(reader.done or reader.stream in streams or reader.stream.failure for reader in self.readers)


@pytest.mark.parametrize("steps, complete", [(2, False), (9, True)])
@pytest.mark.parametrize("whole", [False, True])
def test_output_that_is_unread_when_the_engine_ends(steps, complete, whole):
    """Regression: a reader that had been woken took output that was discarded for an empty answer."""
    machine = ManagerMachine()
    machine.ask([[ENDS, ENDS + 1]], n=1, more=0, max_tokens=4, whole=whole)
    machine.steps(steps, None)
    machine.engine_ends(replay=True)
    (reader,) = machine.readers
    machine.read(reader)
    assert reader.done == complete, "complete answers need no engine, others wait for one"
    machine.teardown()
    assert reader.failure is None and len(reader.got[0, 0]) == 4


# The same search in every run: what it finds, it finds for everybody.
TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)
TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)
