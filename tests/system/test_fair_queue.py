"""Jobs of several clients run in order of the time that each client has used, not of arrival."""

from __future__ import annotations

from aiakq.system.fair_queue import FairQueue


def served(queue: FairQueue[str], seconds: dict[str, float]) -> str:
    order = ""
    while (turn := queue.pop()) is not None:
        client, _ = turn
        queue.charge(client, seconds[client])
        order += client
    return order


def test_clients_share_the_time_and_not_the_number_of_jobs():
    queue: FairQueue[str] = FairQueue()
    for client in "aaabbbbbb":
        queue.put(client, "job")
    assert served(queue, {"a": 2.0, "b": 1.0}) == "abbabbabb"


def test_who_comes_later_neither_owes_nor_has_saved_time():
    queue: FairQueue[str] = FairQueue()
    for _ in range(4):
        queue.put("a", "job")
    for _ in range(2):
        assert queue.pop() == ("a", "job")
        queue.charge("a", 1.0)
    for _ in range(4):
        queue.put("b", "job")
    assert served(queue, {"a": 1.0, "b": 1.0}) == "bababb"
    assert not queue._used or max(queue._used.values()) >= queue._level


def test_jobs_that_may_not_run_and_unwanted_ones_are_passed_over():
    queue: FairQueue[str] = FairQueue()
    for client, job in (("a", "large"), ("a", "small"), ("b", "large")):
        queue.put(client, job)
    assert queue.pop(lambda job: job != "large") == ("a", "small")
    assert queue.pop(lambda job: job != "large") is None and len(queue) == 2
    queue.discard(lambda job: True)
    assert len(queue) == 0 and queue.pop() is None
