"""The scheduler with LoRA adapters: how many run, who makes room, and that nobody waits forever."""

from __future__ import annotations

import random

import pytest

from aiakq.runtime.config.lora import LoraConfig
from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine import adapters
from aiakq.runtime.engine.adapters import AdapterPool, AdapterRef
from aiakq.runtime.engine.fair_scheduler import FairScheduler
from aiakq.runtime.engine.messages import RequestSpec, RequestTimes
from aiakq.runtime.engine.pages import PagePool, root_hash
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.sampling_params import SamplingParams

SCHEDULERS = pytest.mark.parametrize("kind", [Scheduler, FairScheduler])


def ref(key: str, nbytes: int = 10) -> AdapterRef:
    return AdapterRef(key, f"name of {key}", f"/adapters/{key}", nbytes)


class World:
    """A scheduler, and the adapters that an executor would have loaded."""

    def __init__(self, kind=Scheduler, num_pages: int = 60, max_num_seqs: int = 4, **lora: int) -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16, lora=LoraConfig(**lora))
        self.scheduler = kind(PagePool(num_pages, 4), config)
        self.slots: dict[int, str] = {}
        self.count = 0
        self.steps = 0

    def add(self, adapter: AdapterRef | None, tokens: int = 3, prompt: int = 3, client: str = "") -> Sequence:
        self.count += 1
        sampling = SamplingParams(max_tokens=tokens)
        spec = RequestSpec(
            f"r{self.count}", [self.count % 90] * prompt, sampling, tokens, 0, adapter=adapter, client=client
        )
        sequence = Sequence(spec, RequestTimes(float(self.steps)))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """One step; returns the sequences that ran."""
        self.steps += 1
        chunks = self.scheduler.schedule(float(self.steps))
        if chunks:
            freed, loaded = self.scheduler.adapters.changes()
            for slot in freed:
                del self.slots[slot]
            for new in loaded:
                assert new.slot not in self.slots, "the slot is in use"
                self.slots[new.slot] = new.adapter.key
        for chunk in chunks:
            adapter = chunk.sequence.spec.adapter
            assert adapter is None or adapter.key in self.slots.values(), "an adapter that runs was evicted"
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.collected(chunk)
            self.scheduler.insert_pages(chunk)
            if chunk.samples:
                sequence.token_ids.append(7)
                if sequence.num_outputs == sequence.spec.max_tokens:
                    self.scheduler.remove(sequence)
        self.scheduler.check()
        return [chunk.sequence for chunk in chunks]

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not (self.scheduler.running or self.scheduler.waiting):
                return
            self.step()
        raise AssertionError("sequences wait forever")


@SCHEDULERS
def test_no_more_adapters_run_than_allowed_and_base_sequences_pass_by(kind):
    world = World(kind, max_loras=2, max_resident=3)
    a, b, c = (world.add(ref(key)) for key in "abc")
    base, again = world.add(None), world.add(ref("a"))
    assert world.step() == [a, b, base, again]
    assert c in world.scheduler.waiting
    world.drain()
    assert sorted(world.slots.values()) == ["a", "b", "c"]


@SCHEDULERS
def test_the_least_recently_used_adapter_is_evicted(kind):
    world = World(kind, max_loras=1, max_resident=2)
    for key in ("a", "b", "a", "c"):
        world.add(ref(key), tokens=1)
        world.drain()
    assert sorted(world.slots.values()) == ["a", "c"]


@SCHEDULERS
def test_bytes_are_limited(kind):
    world = World(kind, max_loras=4, max_resident=4, max_bytes=25)
    for key in "abc":
        world.add(ref(key))
    assert len(world.step()) == 2
    world.drain()
    assert sorted(world.slots.values()) == ["b", "c"]
    world.add(ref("d", nbytes=25))
    world.drain()
    assert list(world.slots.values()) == ["d"]


@SCHEDULERS
def test_a_dropped_adapter_leaves_memory_after_its_last_sequence(kind):
    world = World(kind, max_loras=1, max_resident=2)
    world.add(ref("a"), tokens=1)
    world.drain()
    world.scheduler.unload_adapter("a")
    assert world.scheduler.adapters.changes() == ([0], [])
    world.slots.clear()
    running, waiting = world.add(ref("b"), tokens=4), world.add(ref("b"), tokens=2, prompt=16)
    world.step()
    world.scheduler.unload_adapter("b")
    world.step()
    assert list(world.slots.values()) == ["b"]
    world.drain()
    assert running.num_outputs == 4 and waiting.num_outputs == 2
    assert world.scheduler.adapters.changes()[0] and world.scheduler.adapters.num_resident == 0


def longest_wait(kind: type[Scheduler], steps: int = 600) -> int:
    """Steps that a sequence waits whose adapter is not running, while others' requests never end."""
    world = World(kind, max_loras=1, max_resident=1, max_num_seqs=3)
    world.add(ref("a"), tokens=5)
    world.step()
    patient = world.add(ref("b"), tokens=2)
    for waited in range(steps):
        if len(world.scheduler.waiting) < 3:
            world.add(ref("a"), tokens=4)
        if patient in world.step():
            return waited
    return steps


@SCHEDULERS
def test_nobody_waits_forever_for_an_adapter(kind):
    assert longest_wait(kind) < 100


@SCHEDULERS
def test_the_test_finds_starvation(kind, monkeypatch):
    monkeypatch.setattr(adapters, "MAX_OVERTAKING", 10**9)
    assert longest_wait(kind) == 600


@SCHEDULERS
@pytest.mark.parametrize("seed", range(12))
def test_random_loads_keep_every_rule(kind, seed):
    draw = random.Random(seed)
    most = draw.randint(1, 3)
    limit = draw.choice([None, 30, 60])
    lora = {"max_loras": most, "max_resident": most + draw.randint(0, 2), "max_bytes": limit}
    world = World(kind, num_pages=draw.choice([12, 40]), **lora)
    keys = {key: ref(key, draw.randint(1, 30)) for key in "abcdef"}
    for _ in range(300):
        if draw.random() < 0.5 and len(world.scheduler.waiting) < 12:
            adapter = None if draw.random() < 0.2 else keys[draw.choice("abcdef")]
            world.add(adapter, draw.randint(1, 6), draw.randint(1, 20), draw.choice(["", "x", "y"]))
        if draw.random() < 0.05:
            live = world.scheduler.running + world.scheduler.waiting
            if live:
                world.scheduler.remove(draw.choice(live))
        if draw.random() < 0.05:
            world.scheduler.unload_adapter(draw.choice("abcdef"))
        world.step()
    world.drain()
    for key in keys:
        world.scheduler.unload_adapter(key)
    assert world.scheduler.adapters.num_resident == world.scheduler.adapters.num_running == 0


def test_an_eviction_while_in_use_would_be_found():
    world = World(max_loras=2, max_resident=2)
    world.add(ref("a"), tokens=9)
    world.step()
    world.scheduler.adapters._evict("a")
    with pytest.raises(AssertionError, match="evicted"):
        world.scheduler.check()


def test_an_adapter_loaded_and_evicted_between_batches_is_never_seen():
    pool = AdapterPool(LoraConfig(max_loras=1, max_resident=1))
    for key in "ab":
        pool.add(ref(key))
        pool.begin_step()
        assert pool.admits(ref(key))
        pool.start(ref(key))
        pool.stop(ref(key))
    assert [new.adapter.key for new in pool.loaded] == ["b"] and pool.freed == []


def test_prefixes_of_adapters_differ():
    assert root_hash("") == b"" and root_hash("x") == root_hash("x", "")
    assert len({root_hash(salt, key) for salt in ("", "x") for key in ("", "a", "b")}) == 6
