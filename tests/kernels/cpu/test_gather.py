"""Gathering: every rank gets the columns of all, whatever their shares, also in parts; waiting ends when it has to."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aiakq.kernels.cpu import gather
from aiakq.kernels.cpu.gather import NativeCollective, memory_bytes
from aiakq.kernels.cpu.recording import Recording

LIMIT = 20.0


@pytest.fixture
def collectives(native) -> Callable[..., list[NativeCollective]]:
    """``collectives(size, time_limit)`` -> the ranks of a new group, which live in this process."""

    def make(size: int, time_limit: float = LIMIT) -> list[NativeCollective]:
        memory = mmap.mmap(-1, memory_bytes(size))
        return [NativeCollective(memory, rank, size, time_limit) for rank in range(size)]

    return make


def on_all(work: Callable[[int], object], size: int) -> list[object]:
    """``work(rank)`` on a thread for each rank."""
    results: list[object] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bounds", [[0, 32, 50], [0, 0, 7], [0, 7, 7], [0, 1, 2, 3], [0, 64, 64, 96, 130]])
@pytest.mark.parametrize("m", [1, 5, 300])
def test_every_rank_gets_the_columns_of_all(collectives, dtype, bounds, m):
    ranks = collectives(len(bounds) - 1)
    whole = torch.randn(m, bounds[-1]).to(dtype)

    def work(rank: int) -> list[Tensor]:
        own = whole[:, bounds[rank] : bounds[rank + 1]]
        return [ranks[rank].gather(own if turn % 2 else own.contiguous(), bounds) for turn in range(7)]

    for results in on_all(work, len(ranks)):
        assert all(torch.equal(result, whole) for result in results)


@pytest.mark.parametrize("m, n", [(40, 33), (1, 4000), (3, 1000)], ids=["rows", "one row", "both"])
def test_what_is_larger_than_the_buffers_goes_through_them_in_parts(collectives, monkeypatch, m, n):
    monkeypatch.setattr(gather, "BUFFER_BYTES", 1024)
    ranks, bounds = collectives(3), [0, n // 5, n // 2, n]
    whole = torch.randn(m, n)

    def work(rank: int) -> Tensor:
        return ranks[rank].gather(whole[:, bounds[rank] : bounds[rank + 1]], bounds)

    assert all(torch.equal(result, whole) for result in on_all(work, 3))
    assert ranks[0].num_barriers > 1


def test_ranks_that_are_late_by_turns_never_see_an_older_activation(collectives):
    ranks, bounds = collectives(2), [0, 3, 8]

    def work(rank: int) -> bool:
        right = True
        for turn in range(200):
            if turn % 17 == rank * 8:
                time.sleep(0.002)
            whole = torch.full((2, 8), float(turn))
            whole[:, bounds[rank] : bounds[rank + 1]] += 0  # this rank's own
            right &= torch.equal(ranks[rank].gather(whole[:, bounds[rank] : bounds[rank + 1]], bounds), whole)
        return right

    assert on_all(work, 2) == [True, True]


def test_it_is_recorded_with_what_is_before_and_after_it(collectives):
    ranks, bounds = collectives(2), [0, 4, 6]
    whole = torch.randn(3, 6)

    def work(rank: int) -> Tensor:
        own = whole[:, bounds[rank] : bounds[rank + 1]].contiguous()
        with Recording() as recording:
            result = ranks[rank].gather(own, bounds)
        ops = recording.op_list()
        ops(1)
        return result.clone()

    assert all(torch.equal(result, whole) for result in on_all(work, 2))


def test_a_late_rank_is_named(collectives):
    ranks = collectives(3, time_limit=0.3)

    def work(rank: int) -> float:
        began = time.monotonic()
        if rank != 2:
            ranks[rank].gather(torch.ones(1, 1), [0, 1, 2, 3])
        return time.monotonic() - began

    waited = on_all(work, 3)
    assert all(0.25 < seconds < 5 for seconds in waited[:2])
    assert ranks[0].is_given_up and {rank.late_rank for rank in ranks} == {2}


def test_waiting_ends_when_the_group_is_given_up(collectives):
    ranks = collectives(2)

    def work(rank: int) -> float:
        began = time.monotonic()
        if rank == 0:
            ranks[0].gather(torch.ones(1, 1), [0, 1, 2])
        else:
            time.sleep(0.2)
            ranks[1].give_up()
        return time.monotonic() - began

    assert max(on_all(work, 2)) < 5
    assert ranks[0].is_given_up and ranks[0].late_rank is None
    ranks[0].gather(torch.ones(1, 1), [0, 1, 2])  # and nothing waits again


def test_ranks_start_over_after_an_interruption(collectives):
    ranks, bounds = collectives(2), [0, 1, 2]

    def interrupted(rank: int) -> None:
        if rank == 0:
            ranks[0].gather(torch.ones(1, 1), bounds)
        else:
            ranks[1].interrupt()

    on_all(interrupted, 2)
    assert ranks[1].is_given_up
    ranks[1].start_over()
    ranks[0].start_over()
    assert not ranks[0].is_given_up
    on_all(lambda rank: ranks[rank].gather(torch.full((1, 1), float(rank)), bounds).tolist(), 2)


def test_columns_that_are_not_those_of_the_rank_are_refused(collectives):
    first, _ = collectives(2)
    with pytest.raises(ValueError, match="columns 0 to 4"):
        first.gather(torch.ones(2, 3), [0, 4, 8])
