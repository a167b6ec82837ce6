"""Steps shared between clients. Sequences are advanced by hand; tests/simulation tests random traffic."""

from __future__ import annotations

import pytest

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.engine.step_builder import FIRST_LIMIT
from aiakq.runtime.protocol.output import RequestTimes
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams

PAGE = 4


def run(scheduler: Scheduler, now: float = 0.0) -> list[tuple[Sequence, int, int]]:
    """Run one step and advance its sequences; return the sequence, first token and count of each chunk."""
    chunks = scheduler.schedule(now)
    for chunk in chunks:
        chunk.sequence.collected(chunk)
        if chunk.samples:
            chunk.sequence.token_ids.append(7)
    scheduler.check()
    return [(chunk.sequence, chunk.first, chunk.count) for chunk in chunks]


def make_scheduler(num_pages=400, max_num_seqs=40, budget=256, **config) -> Scheduler:
    pool = PagePool(num_pages, PAGE, caching=False)
    return Scheduler(pool, SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **config))


def add(scheduler: Scheduler, client: str, length: int, max_tokens: int = 50, priority: int = 0) -> Sequence:
    name = f"{client}{len(scheduler.waiting) + len(scheduler.running)}"
    params = SamplingParams(max_tokens=max_tokens)
    spec = RequestSpec(
        name, [1] * length, params, max_tokens, 0, options=RequestOptions(priority=priority, client=client)
    )
    sequence = Sequence(spec, RequestTimes(0.0))
    scheduler.add(sequence)
    return sequence


def tokens(step: list[tuple[Sequence, int, int]]) -> dict[str, int]:
    """Tokens of a step by client."""
    found: dict[str, int] = {}
    for sequence, _, count in step:
        found[sequence.client] = found.get(sequence.client, 0) + count
    return found


def test_a_step_of_one_client_is_as_if_there_were_none():
    scheduler = make_scheduler(budget=32)
    first, second = add(scheduler, "a", 40), add(scheduler, "a", 40)
    assert run(scheduler) == [(first, 0, 32)]
    assert run(scheduler) == [(first, 32, 8), (second, 0, 24)]
    assert len(scheduler.clients) == 1


def test_a_later_clients_prompt_does_not_wait_for_all_of_anothers():
    scheduler = make_scheduler(budget=64)
    for _ in range(4):
        add(scheduler, "many", 100)
    run(scheduler)
    short = add(scheduler, "one", 30)
    assert tokens(run(scheduler)) == {"many": 34, "one": 30}
    assert short.num_outputs == 1


def test_who_asks_for_more_gets_no_more():
    scheduler = make_scheduler(budget=64)
    for client, number in (("many", 10), ("few", 1)):
        for _ in range(number):
            add(scheduler, client, 120)
    assert [tokens(run(scheduler)) for _ in range(3)] == [{"many": 32, "few": 32}] * 3


def test_a_prompt_next_to_a_decode_is_split_by_the_time_that_steps_take():
    scheduler = make_scheduler()
    add(scheduler, "stream", 4)
    now = 0.0
    for _ in range(3):
        run(scheduler, now)
        now += 0.02
    for _ in range(8):
        add(scheduler, "many", 120)
    assert tokens(run(scheduler, now))["many"] <= FIRST_LIMIT
    seconds = []
    for _ in range(12):
        step = tokens(run(scheduler, now))
        assert step["stream"] == 1, "a decoding sequence is in every step"
        seconds.append(0.02 + 0.001 * sum(step.values()))
        now += seconds[-1]
    # Three times as long as a step of one token for each client.
    assert seconds[-1] == pytest.approx(0.066, rel=0.15)


def test_idle_clients_accumulate_no_credit():
    scheduler = make_scheduler(budget=64)
    add(scheduler, "stream", 4, max_tokens=200)
    for _ in range(4):
        add(scheduler, "many", 150)
    for _ in range(5):
        run(scheduler)
    for _ in range(4):
        add(scheduler, "stream", 150)
    step = tokens(run(scheduler))
    assert abs(step["many"] - step["stream"]) <= 16


def test_an_answer_is_not_preempted_for_a_client_that_holds_more():
    scheduler = make_scheduler(num_pages=31, budget=64)  # 120 tokens
    for _ in range(5):
        add(scheduler, "many", 20)
    run(scheduler)
    run(scheduler)
    late = add(scheduler, "stream", 4, max_tokens=12)
    for _ in range(12):
        run(scheduler)
        assert not late.num_preemptions
    assert late.num_outputs >= 11
    assert scheduler.num_preemptions, "others' pages ran out"


def test_a_client_that_has_nothing_takes_the_place_of_one_of_many():
    scheduler = make_scheduler(max_num_seqs=2)
    first, second = add(scheduler, "many", 5), add(scheduler, "many", 5)
    run(scheduler)
    late = add(scheduler, "one", 5)
    assert scheduler.may_preempt(), "an asynchronous engine collects what is pending before"
    run(scheduler)
    assert late.num_outputs == 1 and second.num_preemptions == 1 and not first.num_preemptions
    assert not scheduler.may_preempt()


def test_a_smaller_priority_goes_first_whosever_it_is():
    scheduler = make_scheduler(budget=16, scheduling_policy="priority")
    add(scheduler, "many", 16, priority=1)
    add(scheduler, "few", 40, priority=1)
    for _ in range(2):
        run(scheduler)
    urgent = add(scheduler, "many", 40, priority=-1)
    answer, rest = run(scheduler)
    assert tokens([answer]) == {"many": 1} and rest == (urgent, 0, 15)


def test_counters_of_departed_clients_are_kept_until_they_are_irrelevant():
    scheduler = make_scheduler(budget=16)
    for _ in range(3):
        add(scheduler, "many", 200)
    add(scheduler, "other", 200)
    burst = add(scheduler, "burst", 40)
    while burst.num_outputs == 0:
        run(scheduler)
    served = scheduler.clients.counters["burst"]
    scheduler.remove(burst)
    assert scheduler.clients.counters["burst"] == served
    again = add(scheduler, "burst", 40)
    assert scheduler.clients.counters["burst"] >= served
    scheduler.remove(again)
    for _ in range(4):
        run(scheduler)
    assert "burst" not in scheduler.clients.counters
    for sequence in [*scheduler.running, *scheduler.waiting]:
        scheduler.remove(sequence)
    assert not scheduler.clients.counters and len(scheduler.clients) == 0


def test_a_preempted_sequence_continues_where_it_was():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, "many", 5)
    second = add(scheduler, "many", 5)
    run(scheduler)
    late = add(scheduler, "one", 5, max_tokens=1)
    run(scheduler)
    scheduler.remove(late)
    run(scheduler)
    assert second.num_outputs == 2
