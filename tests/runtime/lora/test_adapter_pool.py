"""The scheduler with LoRA adapters: how many run, which are staged, and that no sequence starves."""

from __future__ import annotations

import random

import pytest
from adapter_simulation import AdapterSimulation, ref

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


def test_no_more_adapters_run_than_allowed_and_base_sequences_are_not_delayed():
    simulation = AdapterSimulation(max_loras=2, max_resident=3)
    a, b, c = (simulation.add(ref(key)) for key in "abc")
    base, again = simulation.add(None), simulation.add(ref("a"))
    assert simulation.step() == [base]
    assert simulation.step() == [base, a, b, again]
    assert c in simulation.scheduler.waiting
    simulation.drain()
    assert sorted(simulation.slots.values()) == ["a", "b", "c"]


def test_the_least_recently_used_adapter_is_evicted():
    simulation = AdapterSimulation(max_loras=1, max_resident=2)
    for key in ("a", "b", "a", "c"):
        simulation.add(ref(key), tokens=1)
        simulation.drain()
    assert sorted(simulation.slots.values()) == ["a", "c"]


def test_bytes_are_limited():
    simulation = AdapterSimulation(max_loras=4, max_resident=4, max_bytes=25)
    for key in "abc":
        simulation.add(ref(key))
    simulation.step()
    assert simulation.staging == ["a", "b"], "no more bytes are staged than may be in memory"
    assert len(simulation.step()) == 2
    simulation.drain()
    assert sorted(simulation.slots.values()) == ["b", "c"]
    simulation.add(ref("d", nbytes=25))
    simulation.drain()
    assert list(simulation.slots.values()) == ["d"]


def test_a_dropped_adapter_leaves_memory_after_its_last_sequence():
    simulation = AdapterSimulation(max_loras=1, max_resident=2)
    simulation.add(ref("a"), tokens=1)
    simulation.drain()
    simulation.resource.pool.unload("a")
    assert simulation.resource.pool.changes() == [FreeAdapter(0)]
    simulation.slots.clear()
    running, waiting = simulation.add(ref("b"), tokens=4), simulation.add(ref("b"), tokens=2, prompt=16)
    simulation.step()
    simulation.step()
    simulation.resource.pool.unload("b")
    simulation.step()
    assert list(simulation.slots.values()) == ["b"]
    simulation.drain()
    assert running.num_outputs == 4 and waiting.num_outputs == 2
    assert simulation.resource.pool.changes() and simulation.resource.pool.num_resident == 0


def test_others_run_while_an_adapter_is_read():
    simulation = AdapterSimulation(max_loras=2, max_resident=2)
    simulation.add(ref("a"), tokens=1)
    simulation.drain()
    simulation.staged_per_step = 0
    waiting, base, resident = (
        simulation.add(ref("b")),
        simulation.add(None, tokens=40),
        simulation.add(ref("a"), tokens=40),
    )
    for _ in range(40):
        assert simulation.step() == [base, resident]
    simulation.staged_per_step = 1
    assert waiting in simulation.step()


def test_an_adapter_that_is_evicted_while_its_sequence_waits_is_staged_again():
    """The sequence arrives while its adapter is in memory, and starts after the adapter was evicted."""
    simulation = AdapterSimulation(max_loras=1, max_resident=1, max_num_seqs=1)
    simulation.add(ref("a"), tokens=9)
    simulation.stage_all()
    simulation.add(ref("b"), tokens=9)
    simulation.stage_all()
    evicted = simulation.add(ref("a"))
    assert list(simulation.slots.values()) == ["a"]
    simulation.drain()
    assert evicted.num_outputs == 3 and simulation.staging_order == ["a", "b", "a"]


@pytest.mark.parametrize("ends", [False, True])
def test_the_adapter_of_a_preempted_sequence_stays_in_memory(ends):
    """Its client has part of the output, so it must not continue with other weights."""
    simulation = AdapterSimulation(max_loras=1, max_resident=1, max_num_seqs=1)
    sequence = simulation.add(ref("a"), tokens=4)
    simulation.stage_all()
    simulation.scheduler.preempt(sequence)
    other = simulation.add(ref("b"), client="another")
    if ends:
        simulation.scheduler.remove(sequence)
    simulation.stage_all()
    simulation.drain()
    assert other.num_outputs == 3 and simulation.staging_order == ["a", "b"]
    assert ends or sequence.num_outputs == 4


@pytest.mark.parametrize("end", ["length", "abort"])
def test_the_adapter_of_a_request_that_has_begun_stays_in_memory_for_its_other_sequences(end, monkeypatch):
    """Its client has part of the output, so it must not continue with other weights."""
    monkeypatch.setattr(adapters, "MAX_OVERTAKING", 0)
    simulation = AdapterSimulation(max_loras=1, max_resident=1, max_num_seqs=1)
    sequences = [simulation.add(ref("a"), tokens=2, group="one") for _ in range(3)]
    other = simulation.add(ref("b"), tokens=2, client="another")
    while sequences[0].num_outputs < 2:
        simulation.step()
    if end == "abort":
        simulation.scheduler.remove(sequences.pop())
    simulation.stage_all()
    simulation.drain()
    assert [each.num_outputs for each in (*sequences, other)] == [2] * (len(sequences) + 1)
    assert simulation.staging_order == ["a", "b"]
    assert not simulation.resource._siblings and not simulation.resource.pool._pinned


def test_sequences_of_a_later_request_wait_for_an_adapter_that_needs_the_slot(monkeypatch):
    monkeypatch.setattr(adapters, "MAX_OVERTAKING", 0)
    simulation = AdapterSimulation(max_loras=1, max_resident=1, max_num_seqs=1)
    first = [simulation.add(ref("a"), tokens=2, group="one") for _ in range(3)]
    other = simulation.add(ref("b"), tokens=2)
    later = [simulation.add(ref("a"), tokens=2, group="two") for _ in range(3)]
    ended: list[Sequence] = []
    while len(ended) < 7:
        ended += [each for each in simulation.step() if each.num_outputs == 2]
    assert ended == [*first, other, *later] and simulation.staging_order == ["a", "b", "a"]


def test_a_request_that_has_not_begun_does_not_keep_its_adapter():
    simulation = AdapterSimulation(max_loras=1, max_resident=1)
    waiting = [simulation.add(ref("a"), group="one") for _ in range(2)]
    for sequence in waiting:
        simulation.scheduler.remove(sequence)
    assert not simulation.resource._siblings
    simulation.add(ref("b"))
    simulation.drain()
    assert not simulation.resource.pool.is_resident("a")


def test_a_sequence_that_is_preempted_often_continues_although_another_adapter_waits_for_its_slot():
    """Otherwise neither could run: the waiting sequence needs the slot that the preempted one keeps."""
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
    simulation = AdapterSimulation(max_loras=1, max_resident=2, max_num_seqs=1)
    for key in "ab":
        simulation.add(ref(key), tokens=1)
        simulation.drain()
    simulation.add(ref("b"), tokens=9)
    simulation.step()
    for key in "ca":
        simulation.add(ref(key), tokens=2)
    simulation.drain()
    assert simulation.staging_order == ["a", "b", "c"], "a was used before b, but a sequence waits for it"


def test_adapters_are_read_in_order_of_arrival():
    simulation = AdapterSimulation(max_loras=1, max_resident=1)
    simulation.staged_per_step = 1
    for key in "dbacdbe":
        simulation.add(ref(key), tokens=2)
    simulation.drain()
    assert simulation.staging_order[:5] == list("dbace")


def test_adapters_of_one_client_do_not_keep_those_of_another_waiting():
    simulation = AdapterSimulation(max_loras=2, max_resident=8, max_num_seqs=8)
    simulation.staged_per_step = 1
    for number in range(20):
        simulation.add(ref(f"x{number}"), tokens=2, client="x")
    for number in range(2):
        simulation.add(ref(f"y{number}"), tokens=2, client="y")
    simulation.drain()
    assert {"y0", "y1"} < set(simulation.staging_order[:8])


def test_an_adapter_staged_for_a_sequence_that_ends_is_dropped():
    simulation = AdapterSimulation(max_loras=1, max_resident=1)
    runs = simulation.add(ref("a"), tokens=9)
    simulation.stage_all()
    gone, stays, also_gone = simulation.add(ref("b")), simulation.add(ref("c")), simulation.add(ref("c"))
    simulation.stage_all()
    assert simulation.staged == {"b", "c"}
    simulation.scheduler.remove(gone)
    simulation.scheduler.remove(also_gone)
    simulation.step()
    assert simulation.staged == {"c"} and runs in simulation.scheduler.running
    simulation.add(ref("b"))
    simulation.drain()
    assert stays.num_outputs == 3 and simulation.staging_order == ["a", "b", "c", "b"]


def test_an_adapter_that_is_unloaded_while_it_is_read_leaves_memory_with_its_last_sequence():
    simulation = AdapterSimulation(max_loras=1, max_resident=2)
    simulation.staged_per_step = 0
    sequence = simulation.add(ref("a"))
    simulation.step()
    simulation.resource.pool.unload("a")
    simulation.staged_per_step = 1
    simulation.drain()
    assert sequence.num_outputs == 3 and simulation.resource.pool.num_resident == 0


def test_a_replaced_adapter_stays_in_memory_until_its_sequences_have_ended():
    """Its files may be deleted, and its replacement is loaded before a sequence names it."""
    simulation = AdapterSimulation(max_loras=1, max_resident=1, max_num_seqs=1)
    pool = simulation.resource.pool
    simulation.add(ref("other"), tokens=4)
    old = simulation.add(ref("v1"), tokens=2)
    simulation.stage_all()
    assert pool.prefetch(ref("v2"))
    pool.unload("v1", is_replaced=True)
    new = [simulation.add(ref("v2"), tokens=2, client="x") for _ in range(2)]
    late = simulation.add(ref("other"), client="y")
    assert not pool.prefetch(ref("v3")), "v1 and v2 have sequences, so there is no room"
    assert not pool.prefetch(ref("v1")), "it has sequences from before"
    simulation.drain()
    assert all(each.num_outputs for each in (old, *new, late))
    assert simulation.staging_order.count("v1") == 1
    assert pool.prefetch(ref("v3")) and pool.prefetch(ref("v3"))
    simulation.stage_all()
    assert simulation.staged == {"v3"}
    simulation.add(ref("v3"), tokens=1)
    simulation.drain()
    assert simulation.staging_order.count("v3") == 1


def test_an_adapter_prefetched_without_sequences_makes_room_for_one_that_has_some():
    simulation = AdapterSimulation(max_loras=1, max_resident=1)
    pool = simulation.resource.pool
    assert pool.prefetch(ref("a")) and pool.prefetch(ref("b")) and pool.prefetch(ref("c"))
    simulation.stage_all()
    assert simulation.staged == {"b", "c"}
    sequences = [simulation.add(ref(key)) for key in "de"]
    simulation.drain()
    assert [each.num_outputs for each in sequences] == [3, 3]
    for key in "bc":
        pool.unload(key, is_replaced=True)
    simulation.step()
    assert not simulation.staged


@pytest.mark.parametrize("seed", range(6))
def test_no_adapter_in_memory_is_read_again_after_it_was_replaced(seed):
    draw = random.Random(seed)
    most, limit = draw.randint(1, 2), draw.choice([None, 40])
    simulation = AdapterSimulation(max_loras=most, max_resident=most + draw.randint(0, 1), max_bytes=limit)
    pool, versions, gone = simulation.resource.pool, {"a": 0, "b": 0, "c": 0}, set()
    count = 0
    for _ in range(400):
        simulation.staged_per_step = draw.choice([0, 1, 2])
        name = draw.choice("aab")
        key = f"{name}{versions[name]}"
        if draw.random() < 0.5 and len(simulation.scheduler.waiting) < 8:
            simulation.add(ref(key), draw.randint(1, 6), draw.randint(1, 9), draw.choice(["", "x", "y"]))
        elif draw.random() < 0.3 and pool.prefetch(ref(f"{name}{versions[name] + 1}")):
            versions[name] += 1
            count += 1
            if key in pool._resident or key in pool._staged:
                gone.add(key)
            pool.unload(key, is_replaced=True)
        before = len(simulation.staging_order)
        simulation.step()
        assert not gone & set(simulation.staging_order[before:])
    simulation.staged_per_step = 1
    simulation.drain()
    assert count > 5


@pytest.mark.parametrize("bug", ["admits", "_unstage"])
def test_the_simulation_finds_adapters_that_are_not_staged(bug, monkeypatch):
    if bug == "admits":
        monkeypatch.setattr(AdapterPool, "admits", lambda self, adapter, has_begun: len(self._running) < 1)
    else:
        monkeypatch.setattr(AdapterPool, "_unstage", lambda self, adapter: self._staged.pop(adapter.key))
    with pytest.raises((AssertionError, KeyError)):
        test_an_adapter_that_is_evicted_while_its_sequence_waits_is_staged_again()
        test_an_adapter_staged_for_a_sequence_that_ends_is_dropped()


def longest_wait(steps: int = 600, group_size: int = 1) -> int:
    """Return the steps that a sequence waits for its adapter while requests of another adapter keep arriving, each of
    ``group_size`` sequences.
    """
    simulation = AdapterSimulation(max_loras=1, max_resident=1, max_num_seqs=3)
    simulation.add(ref("a"), tokens=5)
    simulation.stage_all()
    patient = simulation.add(ref("b"), tokens=2)
    for waited in range(steps):
        if len(simulation.scheduler.waiting) < 3:
            for _ in range(group_size):
                simulation.add(ref("a"), tokens=4, group=f"{waited}" if group_size > 1 else "")
        if patient in simulation.step():
            return waited
    return steps


@pytest.mark.parametrize("group_size", [1, 8])
def test_no_sequence_starves_for_an_adapter(group_size):
    assert longest_wait(group_size=group_size) < 100


def test_the_simulation_finds_starvation(monkeypatch):
    monkeypatch.setattr(adapters, "MAX_OVERTAKING", 10**9)
    assert longest_wait() == 600


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_violate_no_invariant(seed):
    draw = random.Random(seed)
    most = draw.randint(1, 3)
    limit = draw.choice([None, 30, 60])
    lora = {"max_loras": most, "max_resident": most + draw.randint(0, 2), "max_bytes": limit}
    simulation = AdapterSimulation(num_pages=draw.choice([12, 40]), **lora)
    keys = {key: ref(key, draw.randint(1, 30)) for key in "abcdef"}
    for step in range(300):
        simulation.staged_per_step = draw.choice([0, 0, 1, 2])
        if draw.random() < 0.5 and len(simulation.scheduler.waiting) < 12:
            adapter = None if draw.random() < 0.2 else keys[draw.choice("abcdef")]
            client = draw.choice(["", "x", "y"])
            count = draw.choice([1, 1, 3])
            for _ in range(count):
                simulation.add(adapter, draw.randint(1, 6), draw.randint(1, 20), client, f"{step}" if count > 1 else "")
        if draw.random() < 0.05:
            live = simulation.scheduler.running + simulation.scheduler.waiting
            if live:
                simulation.scheduler.remove(draw.choice(live))
        if draw.random() < 0.05:
            simulation.resource.pool.unload(draw.choice("abcdef"))
        simulation.step()
    simulation.staged_per_step = 1
    simulation.drain()
    assert not simulation.staging and not simulation.staged
    for key in keys:
        simulation.resource.pool.unload(key)
    assert simulation.resource.pool.num_resident == simulation.resource.pool.num_running == 0


def test_the_simulation_finds_an_eviction_of_an_adapter_in_use():
    simulation = AdapterSimulation(max_loras=2, max_resident=2)
    simulation.add(ref("a"), tokens=9)
    simulation.step()
    simulation.step()
    simulation.resource.pool._evict("a")
    with pytest.raises(AssertionError, match="evicted"):
        simulation.scheduler.check()


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
