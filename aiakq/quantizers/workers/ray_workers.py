"""Workers placed by Ray, possibly on several nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.quantizers.workers.messages import Job
from aiakq.quantizers.workers.other_worker import CODE, OtherWorker
from aiakq.quantizers.workers.worker_group import FirstWorker
from aiakq.runtime.distributed.ray_processes import RayProcesses


def start_ray_workers(job: Job, samples: Sequence[Tensor]) -> FirstWorker:
    """Start workers 1 to ``job.size`` - 1. Until the group is closed, this process uses the threads reserved for it.
    ``rank``, ``threads`` and ``scratch`` of ``job`` are set for each worker.

    Raises ``worker_failed``, ``ray_missing``, ``ray_unavailable`` and ``ray_resources``.
    """
    processes = RayProcesses(job.size, 1, CODE)
    others: list[OtherWorker] = []
    try:
        with _errors_of_workers():
            processes.start()
        processes.listener.close()
        for rank, sock in sorted(processes.sockets.items()):
            # The folder for hidden states exists only on this machine.
            own = msgspec.structs.replace(job, rank=rank, threads=processes.placement.slots[rank].threads, scratch="")
            others.append(OtherWorker(processes.process(rank), sock, own, samples))
        processes.use_threads()
    except BaseException:
        FirstWorker(others, processes.close).close()
        raise
    return FirstWorker(others, processes.close)


@contextlib.contextmanager
def _errors_of_workers() -> Iterator[None]:
    """Convert errors of a process that does not start to errors of a worker."""
    try:
        yield
    except AiakqError as failure:
        rank = failure.fields.get("rank")
        if rank is None:
            raise
        raise error("worker_failed", worker=rank, reason=failure.message.rstrip(".")) from failure
