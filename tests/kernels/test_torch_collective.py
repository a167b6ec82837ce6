"""all_gather, all_reduce and broadcast over gloo with threads as ranks; a late rank is detected and named."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from aiakq.kernels.cpu.recording import Recording, RecordingError
from aiakq.kernels.torch_collective import StepWatch, TorchCollective

CPU = torch.device("cpu")


def group(size: int, time_limit: float = 20.0) -> list[TorchCollective]:
    descriptor = os.memfd_create("ranks")
    try:
        return [TorchCollective(descriptor, rank, size, time_limit, CPU) for rank in range(size)]
    finally:
        os.close(descriptor)


def on_every_rank(collectives, function) -> list:
    found = [None] * len(collectives)

    def run(rank):
        found[rank] = function(collectives[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(collectives))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def three() -> list[TorchCollective]:
    collectives = group(3)
    on_every_rank(collectives, lambda one: one.connect(20))
    return collectives


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bounds", [[0, 4, 8, 12], [0, 5, 9, 11], [0, 7, 7, 8], [0, 0, 0, 0]])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_columns_are_put_side_by_side(three, dtype, bounds, rows):
    whole = torch.randn(rows, bounds[-1]).to(dtype)
    # Parts of something wider, as activations are.
    wide = torch.cat([whole, whole], dim=1)
    found = on_every_rank(three, lambda one: one.gather(wide[:, bounds[one.rank] : bounds[one.rank + 1]], bounds))
    assert all(torch.equal(each, whole) and each.dtype == dtype for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_the_same_on_every_rank(three, dtype):
    parts = [torch.randn(4, 33).to(dtype) for _ in range(3)]
    found = on_every_rank(three, lambda one: one.sum(parts[one.rank].clone()))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    wanted = sum(part.double() for part in parts)
    assert (found[0].double() - wanted).norm() / wanted.norm() < {torch.float32: 1e-6}.get(dtype, 1e-2)


def test_what_rank_0_has_reaches_all(three):
    tensors = [torch.full((5,), one.rank) for one in three]
    on_every_rank(three, lambda one: one.broadcast(tensors[one.rank]))
    assert all(not tensor.any() for tensor in tensors)


def test_other_columns_than_those_of_the_rank_are_refused(three):
    with pytest.raises(ValueError, match="rows .* for 4 columns"):
        three[0].gather(torch.zeros(2, 5), [0, 4, 8, 12])


def test_nothing_is_recorded_without_it(three):
    x = torch.zeros(2, 4)
    for call in (lambda: three[0].gather(x, [0, 4, 8, 12]), lambda: three[0].sum(x)):
        with Recording(), pytest.raises(RecordingError, match="ranks communicate through torch.distributed"):
            call()


def test_a_rank_that_does_not_come_at_the_start_is_named():
    collectives = group(3)
    found = on_every_rank(collectives[:2], lambda one: one.connect(0.5) or one.late_rank)
    assert found == [2, 2] and all(one.is_given_up for one in collectives[:2])
    assert collectives[0].operation == "initializing the process group"


def test_a_rank_that_does_not_come_later_is_named():
    collectives = group(3, time_limit=0.5)
    on_every_rank(collectives, lambda one: one.connect(20))
    began = time.monotonic()
    found = on_every_rank([collectives[0], collectives[2]], lambda one: one.sum(torch.ones(1, 4)) is not None)
    assert found == [True, True] and time.monotonic() - began < 10
    assert collectives[0].late_rank == collectives[2].late_rank == 1
    assert collectives[0].operation == "operation 2 of torch.distributed"


def test_waiting_at_the_start_ends_when_the_group_is_given_up():
    (one, _) = group(2)
    threading.Timer(0.2, one.give_up).start()
    began = time.monotonic()
    one.connect(20)
    assert one.is_given_up and one.late_rank is None and time.monotonic() - began < 5


class Step:
    """Stands for an event on a device."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def is_done(self) -> bool:
        return time.monotonic() > self.end


def test_a_step_that_does_not_end_is_noticed_and_others_are_not():
    late = threading.Event()
    watch = StepWatch(0.5, late.set)
    for number in range(4):  # each waits for the one before: only their sum is longer than the limit
        watch.add(Step(0.2 * (number + 1)).is_done)
    assert not late.wait(1.2)
    began = time.monotonic()
    watch.add(Step(60).is_done)
    assert late.wait(5) and time.monotonic() - began > 0.4


def test_a_watch_that_was_stopped_says_nothing():
    late = threading.Event()
    watch = StepWatch(0.2, late.set)
    watch.add(Step(60).is_done)
    watch.stop()
    assert not late.wait(0.6)
