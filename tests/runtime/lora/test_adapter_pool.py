"""The scheduler with LoRA adapters: how many run, which are read ahead, and that nobody waits forever."""

from __future__ import annotations

import random

import pytest
from adapter_world import World, ref

from aiakq.runtime.config.lora import LoraConfig
from aiakq.runtime.engine.pages import root_hash
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.lora import adapter_pool as adapters
from aiakq.runtime.lora.adapter_pool import AdapterPool
from aiakq.runtime.lora.resource import AdapterResource
from aiakq.runtime.protocol.command import EnableDrafts, FreeAdapter, UnloadAdapter
from aiakq.runtime.protocol.output import RequestTimes
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams


def test_no_more_adapters_run_than_allowed_and_base_sequences_pass_by():
    world = World(max_loras=2, max_resident=3)
    a, b, c = (world.add(ref(key)) for key in "abc")
    base, again = world.add(None), world.add(ref("a"))
    assert world.step() == [base]
    assert world.step() == [base, a, b, again]
    assert c in world.scheduler.waiting
    world.drain()
    assert sorted(world.slots.values()) == ["a", "b", "c"]


def test_the_least_recently_used_adapter_is_evicted():
    world = World(max_loras=1, max_resident=2)
    for key in ("a", "b", "a", "c"):
        world.add(ref(key), tokens=1)
        world.drain()
    assert sorted(world.slots.values()) == ["a", "c"]


def test_bytes_are_limited():
    world = World(max_loras=4, max_resident=4, max_bytes=25)
    for key in "abc":
        world.add(ref(key))
    world.step()
    assert world.reading == ["a", "b"], "no more bytes are staged than may be in memory"
    assert len(world.step()) == 2
    world.drain()
    assert sorted(world.slots.values()) == ["b", "c"]
    world.add(ref("d", nbytes=25))
    world.drain()
    assert list(world.slots.values()) == ["d"]


def test_a_dropped_adapter_leaves_memory_after_its_last_sequence():
    world = World(max_loras=1, max_resident=2)
    world.add(ref("a"), tokens=1)
    world.drain()
    world.resource.pool.unload("a")
    assert world.resource.pool.changes() == [FreeAdapter(0)]
    world.slots.clear()
    running, waiting = world.add(ref("b"), tokens=4), world.add(ref("b"), tokens=2, prompt=16)
    world.step()
    world.step()
    world.resource.pool.unload("b")
    world.step()
    assert list(world.slots.values()) == ["b"]
    world.drain()
    assert running.num_outputs == 4 and waiting.num_outputs == 2
    assert world.resource.pool.changes() and world.resource.pool.num_resident == 0


def test_others_run_while_an_adapter_is_read():
    world = World(max_loras=2, max_resident=2)
    world.add(ref("a"), tokens=1)
    world.drain()
    world.reads_per_step = 0
    held, base, resident = world.add(ref("b")), world.add(None, tokens=40), world.add(ref("a"), tokens=40)
    for _ in range(40):
        assert world.step() == [base, resident]
    world.reads_per_step = 1
    assert held in world.step()


def test_an_adapter_that_is_evicted_while_its_sequence_waits_is_staged_again():
    """The sequence arrives when its adapter is in memory, and starts when it is not any more."""
    world = World(max_loras=1, max_resident=1, max_num_seqs=1)
    world.add(ref("a"), tokens=9)
    world.read_all()
    world.add(ref("b"), tokens=9)
    world.read_all()
    evicted = world.add(ref("a"))
    assert list(world.slots.values()) == ["a"]
    world.drain()
    assert evicted.num_outputs == 3 and world.reads == ["a", "b", "a"]


@pytest.mark.parametrize("ends", [False, True])
def test_the_adapter_of_a_preempted_sequence_stays_in_memory(ends):
    """Part of its output has been read, so that it could not begin again with other files."""
    world = World(max_loras=1, max_resident=1, max_num_seqs=1)
    sequence = world.add(ref("a"), tokens=4)
    world.read_all()
    world.scheduler.preempt(sequence)
    other = world.add(ref("b"), client="another")
    if ends:
        world.scheduler.remove(sequence)
    world.read_all()
    world.drain()
    assert other.num_outputs == 3 and world.reads == ["a", "b"]
    assert ends or sequence.num_outputs == 4


@pytest.mark.parametrize("end", ["length", "abort"])
def test_the_adapter_of_a_request_that_has_begun_stays_in_memory_for_its_other_sequences(end, monkeypatch):
    """Part of the output has been read, so that the request could not begin again with other files."""
    monkeypatch.setattr(adapters, "MAX_OVERTAKING", 0)
    world = World(max_loras=1, max_resident=1, max_num_seqs=1)
    sequences = [world.add(ref("a"), tokens=2, group="one") for _ in range(3)]
    other = world.add(ref("b"), tokens=2, client="another")
    while sequences[0].num_outputs < 2:
        world.step()
    if end == "abort":
        world.scheduler.remove(sequences.pop())
    world.read_all()
    world.drain()
    assert [each.num_outputs for each in (*sequences, other)] == [2] * (len(sequences) + 1)
    assert world.reads == ["a", "b"]
    assert not world.resource._siblings and not world.resource.pool._pinned


def test_the_sequences_of_another_request_wait_behind_an_adapter_that_needs_the_place(monkeypatch):
    monkeypatch.setattr(adapters, "MAX_OVERTAKING", 0)
    world = World(max_loras=1, max_resident=1, max_num_seqs=1)
    first = [world.add(ref("a"), tokens=2, group="one") for _ in range(3)]
    other = world.add(ref("b"), tokens=2)
    later = [world.add(ref("a"), tokens=2, group="two") for _ in range(3)]
    ended: list[Sequence] = []
    while len(ended) < 7:
        ended += [each for each in world.step() if each.num_outputs == 2]
    assert ended == [*first, other, *later] and world.reads == ["a", "b", "a"]


def test_a_request_that_has_not_begun_does_not_keep_its_adapter():
    world = World(max_loras=1, max_resident=1)
    waiting = [world.add(ref("a"), group="one") for _ in range(2)]
    for sequence in waiting:
        world.scheduler.remove(sequence)
    assert not world.resource._siblings
    world.add(ref("b"))
    world.drain()
    assert not world.resource.pool.is_resident("a")


def test_a_sequence_that_is_preempted_often_runs_on_although_another_adapter_waits_for_its_place():
    """Nobody could run otherwise: the one that waits needs the place of the adapter that the preempted one keeps."""
    pool = AdapterPool(LoraConfig(max_loras=1, max_resident=1))
    first, second = ref("first"), ref("second")
    pool.add(first)
    assert pool.prefetch(first)
    pool.set_ready(first.key)
    pool.start(first)
    pool.add(second)
    assert pool.prefetch(second)
    pool.set_ready(second.key)
    for _ in range(2 * adapters.MAX_OVERTAKING):
        pool.stop(first)
        pool.pin(first)
        pool.end_step([second, first])
        assert not pool.admits(second), "the preempted sequence keeps its adapter in memory"
        assert pool.admits(first, has_begun=True)
        pool.start(first)
        pool.unpin(first)
    pool.stop(first)
    pool.remove(first)
    pool.end_step([second])
    assert pool.admits(second)


def test_adapters_that_no_waiting_sequence_needs_are_evicted_first():
    world = World(max_loras=1, max_resident=2, max_num_seqs=1)
    for key in "ab":
        world.add(ref(key), tokens=1)
        world.drain()
    world.add(ref("b"), tokens=9)
    world.step()
    for key in "ca":
        world.add(ref(key), tokens=2)
    world.drain()
    assert world.reads == ["a", "b", "c"], "a was used before b, but a sequence waits for it"


def test_adapters_are_read_in_order_of_arrival():
    world = World(max_loras=1, max_resident=1)
    world.reads_per_step = 1
    for key in "dbacdbe":
        world.add(ref(key), tokens=2)
    world.drain()
    assert world.reads[:5] == list("dbace")


def test_adapters_of_one_client_do_not_keep_those_of_another_waiting():
    world = World(max_loras=2, max_resident=8, max_num_seqs=8)
    world.reads_per_step = 1
    for number in range(20):
        world.add(ref(f"x{number}"), tokens=2, client="x")
    for number in range(2):
        world.add(ref(f"y{number}"), tokens=2, client="y")
    world.drain()
    assert {"y0", "y1"} < set(world.reads[:8])


def test_what_was_read_for_a_sequence_that_ends_is_dropped():
    world = World(max_loras=1, max_resident=1)
    runs = world.add(ref("a"), tokens=9)
    world.read_all()
    gone, stays, also = world.add(ref("b")), world.add(ref("c")), world.add(ref("c"))
    world.read_all()
    assert world.read == {"b", "c"}
    world.scheduler.remove(gone)
    world.scheduler.remove(also)
    world.step()
    assert world.read == {"c"} and runs in world.scheduler.running
    world.add(ref("b"))
    world.drain()
    assert stays.num_outputs == 3 and world.reads == ["a", "b", "c", "b"]


def test_an_adapter_that_is_unloaded_while_it_is_read_leaves_memory_with_its_last_sequence():
    world = World(max_loras=1, max_resident=2)
    world.reads_per_step = 0
    sequence = world.add(ref("a"))
    world.step()
    world.resource.pool.unload("a")
    world.reads_per_step = 1
    world.drain()
    assert sequence.num_outputs == 3 and world.resource.pool.num_resident == 0


def test_a_replaced_adapter_stays_in_memory_until_its_sequences_have_ended():
    """Its files may be gone, and the one that replaces it is in memory before a sequence names it."""
    world = World(max_loras=1, max_resident=1, max_num_seqs=1)
    pool = world.resource.pool
    world.add(ref("other"), tokens=4)
    old = world.add(ref("v1"), tokens=2)
    world.read_all()
    assert pool.prefetch(ref("v2"))
    pool.unload("v1", is_replaced=True)
    new = [world.add(ref("v2"), tokens=2, client="x") for _ in range(2)]
    late = world.add(ref("other"), client="y")
    assert not pool.prefetch(ref("v3")), "v1 and v2 have sequences, so there is no room"
    assert not pool.prefetch(ref("v1")), "it has sequences from before"
    world.drain()
    assert all(each.num_outputs for each in (old, *new, late))
    assert world.reads.count("v1") == 1
    assert pool.prefetch(ref("v3")) and pool.prefetch(ref("v3"))
    world.read_all()
    assert world.read == {"v3"}
    world.add(ref("v3"), tokens=1)
    world.drain()
    assert world.reads.count("v3") == 1


def test_an_adapter_prefetched_without_sequences_makes_room_for_one_that_has_some():
    world = World(max_loras=1, max_resident=1)
    pool = world.resource.pool
    assert pool.prefetch(ref("a")) and pool.prefetch(ref("b")) and pool.prefetch(ref("c"))
    world.read_all()
    assert world.read == {"b", "c"}
    sequences = [world.add(ref(key)) for key in "de"]
    world.drain()
    assert [each.num_outputs for each in sequences] == [3, 3]
    for key in "bc":
        pool.unload(key, is_replaced=True)
    world.step()
    assert not world.read


@pytest.mark.parametrize("seed", range(6))
def test_no_adapter_in_memory_is_read_again_after_it_was_replaced(seed):
    draw = random.Random(seed)
    most, limit = draw.randint(1, 2), draw.choice([None, 40])
    world = World(max_loras=most, max_resident=most + draw.randint(0, 1), max_bytes=limit)
    pool, versions, gone = world.resource.pool, {"a": 0, "b": 0, "c": 0}, set()
    count = 0
    for _ in range(400):
        world.reads_per_step = draw.choice([0, 1, 2])
        name = draw.choice("aab")
        key = f"{name}{versions[name]}"
        if draw.random() < 0.5 and len(world.scheduler.waiting) < 8:
            world.add(ref(key), draw.randint(1, 6), draw.randint(1, 9), draw.choice(["", "x", "y"]))
        elif draw.random() < 0.3 and pool.prefetch(ref(f"{name}{versions[name] + 1}")):
            versions[name] += 1
            count += 1
            if key in pool._resident or key in pool._staged:
                gone.add(key)
            pool.unload(key, is_replaced=True)
        before = len(world.reads)
        world.step()
        assert not gone & set(world.reads[before:])
    world.reads_per_step = 1
    world.drain()
    assert count > 5


@pytest.mark.parametrize("bug", ["admits", "_unstage"])
def test_the_tests_find_adapters_that_are_not_staged(bug, monkeypatch):
    if bug == "admits":
        monkeypatch.setattr(AdapterPool, "admits", lambda self, adapter, has_begun: len(self._running) < 1)
    else:
        monkeypatch.setattr(AdapterPool, "_unstage", lambda self, adapter: self._staged.pop(adapter.key))
    with pytest.raises((AssertionError, KeyError)):
        test_an_adapter_that_is_evicted_while_its_sequence_waits_is_staged_again()
        test_what_was_read_for_a_sequence_that_ends_is_dropped()


def longest_wait(steps: int = 600, group_size: int = 1) -> int:
    """Steps that a sequence waits whose adapter is not running, while others' requests, each of ``group_size``
    sequences, never end.
    """
    world = World(max_loras=1, max_resident=1, max_num_seqs=3)
    world.add(ref("a"), tokens=5)
    world.read_all()
    patient = world.add(ref("b"), tokens=2)
    for waited in range(steps):
        if len(world.scheduler.waiting) < 3:
            for _ in range(group_size):
                world.add(ref("a"), tokens=4, group=f"{waited}" if group_size > 1 else "")
        if patient in world.step():
            return waited
    return steps


@pytest.mark.parametrize("group_size", [1, 8])
def test_nobody_waits_forever_for_an_adapter(group_size):
    assert longest_wait(group_size=group_size) < 100


def test_the_test_finds_starvation(monkeypatch):
    monkeypatch.setattr(adapters, "MAX_OVERTAKING", 10**9)
    assert longest_wait() == 600


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_keep_every_rule(seed):
    draw = random.Random(seed)
    most = draw.randint(1, 3)
    limit = draw.choice([None, 30, 60])
    lora = {"max_loras": most, "max_resident": most + draw.randint(0, 2), "max_bytes": limit}
    world = World(num_pages=draw.choice([12, 40]), **lora)
    keys = {key: ref(key, draw.randint(1, 30)) for key in "abcdef"}
    for step in range(300):
        world.reads_per_step = draw.choice([0, 0, 1, 2])
        if draw.random() < 0.5 and len(world.scheduler.waiting) < 12:
            adapter = None if draw.random() < 0.2 else keys[draw.choice("abcdef")]
            client = draw.choice(["", "x", "y"])
            count = draw.choice([1, 1, 3])
            for _ in range(count):
                world.add(adapter, draw.randint(1, 6), draw.randint(1, 20), client, f"{step}" if count > 1 else "")
        if draw.random() < 0.05:
            live = world.scheduler.running + world.scheduler.waiting
            if live:
                world.scheduler.remove(draw.choice(live))
        if draw.random() < 0.05:
            world.resource.pool.unload(draw.choice("abcdef"))
        world.step()
    world.reads_per_step = 1
    world.drain()
    assert not world.reading and not world.read
    for key in keys:
        world.resource.pool.unload(key)
    assert world.resource.pool.num_resident == world.resource.pool.num_running == 0


def test_an_eviction_while_in_use_would_be_found():
    world = World(max_loras=2, max_resident=2)
    world.add(ref("a"), tokens=9)
    world.step()
    world.step()
    world.resource.pool._evict("a")
    with pytest.raises(AssertionError, match="evicted"):
        world.scheduler.check()


def test_an_adapter_loaded_and_evicted_between_batches_is_never_seen():
    pool = AdapterPool(LoraConfig(max_loras=1, max_resident=1))
    for key in "ab":
        pool.add(ref(key))
        pool.end_step([ref(key)])
        assert not pool.admits(ref(key))
        pool.set_ready(key)
        assert pool.admits(ref(key))
        pool.start(ref(key))
        pool.stop(ref(key))
    assert [new.adapter.key for new in pool.loaded] == ["b"] and pool.freed == []
    assert [adapter.key for adapter in pool.dropped] == ["a"], "the executor keeps an adapter that no batch loads"


def test_an_expected_sequence_keeps_an_unloaded_adapter_until_it_is_added_and_ends_or_is_withdrawn():
    resource = AdapterResource(LoraConfig(max_loras=1, max_resident=1))
    specs = [RequestSpec(id, [1], SamplingParams(), 1, 0, options=RequestOptions(adapter=ref("a"))) for id in "xyz"]
    first, second, third = (Sequence(spec, RequestTimes(0.0)) for spec in specs)
    resource.add(first)
    resource.end_step(iter([first]))
    resource.pool.set_ready("a")
    resource.acquire(first)
    for spec in specs[1:]:
        resource.expect(spec)
    assert resource.handle(UnloadAdapter("a")) and not resource.handle(EnableDrafts(True))
    resource.release(first)
    resource.remove(first)
    assert resource.pool.is_resident("a") and not resource.pool.prefetch(ref("a"))
    resource.add(second)
    resource.remove(second)
    resource.withdraw(specs[1])  # it was added
    assert resource.pool.is_resident("a")
    resource.withdraw(third.spec)
    assert not resource.pool.is_resident("a") and resource.pool.prefetch(ref("a"))


def test_prefixes_of_adapters_differ():
    adapters = [None, ref("a"), ref("b")]
    options = [RequestOptions(cache_salt=salt, adapter=adapter) for salt in ("", "x") for adapter in adapters]
    roots = [root_hash(each.page_scope) for each in options]
    assert roots[0] == b"" and len(set(roots)) == 6
