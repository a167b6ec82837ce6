"""Workers placed by Ray, possibly on several nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.quantizers.workers.messages import Job
from aiakq.quantizers.workers.other_worker import CODE, OtherWorker
from aiakq.quantizers.workers.worker_group import WorkerGroup
from aiakq.runtime.distributed.ray_cluster import Placement, Session
from aiakq.runtime.distributed.ray_processes import RayProcesses
from aiakq.system.threads import RestoreThreads


def start_ray_workers(job: Job, samples: Sequence[Tensor]) -> WorkerGroup:
    """Start workers 1 to ``job.size`` - 1. Until the group is closed, this process uses the threads reserved for it.
    ``rank``, ``threads`` and ``scratch`` of ``job`` are set for each worker.

    Raises ``worker_failed``, ``ray_missing``, ``ray_unavailable`` and ``ray_resources``.
    """
    session, started = Session(), contextlib.ExitStack()
    others: list[OtherWorker] = []
    try:
        started.callback(RestoreThreads(torch.get_num_threads(), torch.set_num_threads))
        placement = Placement(session, job.size, 1)
        started.callback(placement.close)
        processes = RayProcesses(session, placement, CODE)
        started.callback(processes.close)
        with _errors_of_workers():
            processes.start()
        processes.listener.close()
        for rank, sock in sorted(processes.sockets.items()):
            # The folder for hidden states exists only on this machine.
            own = msgspec.structs.replace(job, rank=rank, threads=placement.slots[rank].threads, scratch="")
            others.append(OtherWorker(processes.process(rank), sock, own, samples))
        torch.set_num_threads(min(placement.slots[0].threads, torch.get_num_threads()))
    except BaseException:
        WorkerGroup(others, started.close).close()
        raise
    return WorkerGroup(others, started.close)


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
