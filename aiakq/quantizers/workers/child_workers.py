"""Workers as child processes of worker 0, on one machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.quantizers.workers.messages import Job
from aiakq.quantizers.workers.other_worker import CODE, OtherWorker
from aiakq.quantizers.workers.worker_group import FirstWorker
from aiakq.system.child import Child, child_command
from aiakq.system.threads import RestoreThreads
from aiakq.system.topology import cpu_shares


def start_child_workers(job: Job, samples: Sequence[Tensor]) -> FirstWorker:
    """Start workers 1 to ``job.size`` - 1. Until the group is closed, this process has one worker's share of the
    threads and processors. ``rank``, ``threads`` and ``cpus`` of ``job`` are set for each worker.

    Raises ``worker_failed``.
    """
    restore = RestoreThreads(torch.get_num_threads(), torch.set_num_threads)
    threads, cpus = max(1, torch.get_num_threads() // job.size), cpu_shares(job.size)
    others: list[OtherWorker] = []
    try:
        for rank in range(1, job.size):
            own = msgspec.structs.replace(job, rank=rank, threads=threads, cpus=cpus[rank])
            try:
                process = Child(child_command(CODE), threads=threads)
            except OSError as failure:
                raise error("worker_failed", worker=rank, reason=f"it could not be started: {failure}") from None
            others.append(OtherWorker(process, process.sockets[0], own, samples))
    except BaseException:
        FirstWorker(others, restore).close()
        raise
    torch.set_num_threads(threads)
    if cpus[0]:
        os.sched_setaffinity(0, cpus[0])
    return FirstWorker(others, restore)
