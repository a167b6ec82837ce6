"""How work is divided among workers: shards, tasks, and sums in a fixed order."""

import socket

import msgspec
import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.quantizers.numerics.sums import total
from aiakq.quantizers.workers.messages import FirstChannel, Values
from aiakq.quantizers.workers.protocol import SHARDS, Task, owners, shards
from aiakq.quantizers.workers.values import receive_values
from aiakq.quantizers.workers.worker_group import FirstWorker
from aiakq.system.channel import LENGTH


def test_shards_hold_every_batch_once_in_order():
    for batches in (0, 1, 3, 7, 8, 9, 16, 100):
        found = shards(batches)
        assert [batch for shard in found for batch in shard] == list(range(batches))
        assert len(found) == min(SHARDS, batches) and all(found)
        assert max(map(len, found), default=0) - min(map(len, found), default=0) <= 1


def test_the_longest_tasks_go_first_and_to_the_worker_with_the_least_work():
    tasks = [Task(cost, list) for cost in (1, 5, 2, 2, 4)]
    found = owners(tasks, 2)
    assert sorted(
        sum(task.cost for task, owner in zip(tasks, found, strict=True) if owner == worker) for worker in (0, 1)
    ) == [7, 7]
    assert owners(tasks, 1) == [0] * 5


def test_one_process_merges_parts_in_order():
    def merge(whole, part):
        whole.append(part[0])

    workers = FirstWorker()
    assert workers.combine(3, iter([["a"], ["b"], ["c"]]), merge) == ["a", "b", "c"]
    assert workers.share([Task(1, lambda: [1]), Task(2, lambda: ["x", None])]) == [[1], ["x", None]]


def test_a_sum_does_not_depend_on_threads():
    x = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)).square()
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.add((total(x), total(x.double())))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert abs(next(iter(found))[0] / float(x.double().sum()) - 1) < 1e-6


def test_what_workers_return_does_not_depend_on_their_number(together):
    numbers = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))

    def merge(whole, part):
        whole[0].add_(part[0])

    def work(workers):
        own = ([numbers[part].clone()] for part in range(workers.rank, 7, workers.size))
        (summed,) = workers.combine(7, own, merge)
        shared = workers.share([Task(part, lambda part=part: [part, numbers[part] * 2, None]) for part in range(7)])
        passed = workers.broadcast(workers.size - 1, lambda: [workers.rank, True, "text", 0.1, torch.ones(0, 3)])
        workers.agree(5)
        return summed, shared, passed

    (alone, shared, _) = work(FirstWorker())
    for size in (2, 3, 5):
        for summed, results, passed in together(size, work):
            assert torch.equal(summed, alone)
            for (part, tensor, nothing), (_, wanted, _) in zip(results, shared, strict=True):
                assert torch.equal(tensor, wanted) and nothing is None and 0 <= part < 7
            assert passed[:4] == [size - 1, True, "text", 0.1] and passed[4].shape == (0, 3)


def test_each_task_is_run_once(together):
    ran = []

    def work(workers):
        return workers.share([Task(1.0, lambda part=part: ran.append(part) or [part]) for part in range(9)])

    assert together(3, work) == [[[part] for part in range(9)]] * 3
    assert sorted(ran) == list(range(9))


def test_workers_that_compute_other_numbers_are_named(together):
    with pytest.raises(AiakqError) as caught:
        together(3, lambda workers: workers.agree(7 if workers.rank == 2 else 5))
    assert caught.value.id == "worker_failed" and "Worker 2 failed: it computes other numbers" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
def test_tensors_arrive_as_they_were_sent(dtype, together):
    sent = [torch.randn(3, 4).mul(9).to(dtype).T, torch.tensor(3).to(dtype), torch.zeros(2, 0, dtype=dtype)]
    for found in together(2, lambda workers: workers.broadcast(1, lambda: sent)):
        for wanted, tensor in zip(sent, found, strict=True):
            assert tensor.dtype == dtype and torch.equal(tensor, wanted)


@pytest.mark.parametrize(
    "body",
    [
        b"\x93\x01\x02",
        msgspec.msgpack.encode({"type": "values", "items": [{"type": "tensor", "dtype": "load", "shape": [1]}]}),
        msgspec.msgpack.encode({"type": "values", "items": [{"type": "tensor", "dtype": "int8", "shape": [-1]}]}),
        msgspec.msgpack.encode({"type": "values", "items": [{"type": "tensor", "dtype": "int8", "shape": [1] * 9}]}),
        msgspec.msgpack.encode({"type": "other"}),
    ],
)
def test_what_is_no_message_is_refused(body):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(LENGTH.pack(len(body)) + body)
        with pytest.raises(ValueError):
            receive_values(FirstChannel(ours, Values))
