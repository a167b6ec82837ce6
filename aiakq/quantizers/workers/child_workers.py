"""Workers as child processes of worker 0's, on one machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.quantizers.workers.messages import Job
from aiakq.quantizers.workers.other_worker import OtherWorker
from aiakq.quantizers.workers.worker_group import WorkerGroup
from aiakq.system.processes import end_child, exit_reason, start_child
from aiakq.system.threads import RestoreThreads
from aiakq.system.topology import cpu_shares

_CODE = "from aiakq.quantizers.worker_process import main; main()"


def start_child_workers(job: Job, samples: Sequence[Tensor]) -> WorkerGroup:
    """Workers 1 to ``job.size`` - 1. Until the group is closed, this process has a worker's share of the threads and of
    the processors. ``rank``, ``threads`` and ``cpus`` of ``job`` are filled in for each.

    Raises ``worker_failed``.
    """
    restore = RestoreThreads(torch.get_num_threads(), torch.set_num_threads)
    threads, cpus = max(1, torch.get_num_threads() // job.size), cpu_shares(job.size)
    others: list[OtherWorker] = []
    try:
        for rank in range(1, job.size):
            process = _Child(rank, threads)
            own = msgspec.structs.replace(job, rank=rank, threads=threads, cpus=cpus[rank])
            others.append(OtherWorker(process, process.socket, own, samples))
    except BaseException:
        WorkerGroup(others, restore).close()
        raise
    torch.set_num_threads(threads)
    if cpus[0]:
        os.sched_setaffinity(0, cpus[0])
    return WorkerGroup(others, restore)


class _Child:
    """See WorkerProcess. ``socket`` leads to the process."""

    def __init__(self, rank: int, threads: int) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._process = start_child(_CODE, theirs.fileno(), pass_fds=(theirs.fileno(),), threads=threads)
        except OSError as failure:
            self.socket.close()
            raise error("worker_failed", worker=rank, reason=f"it could not be started: {failure}") from None
        finally:
            theirs.close()

    def kill(self) -> None:
        """See WorkerProcess."""
        self._process.kill()

    def end(self) -> None:
        """See WorkerProcess."""
        end_child(self._process)

    def exit_reason(self) -> str:
        """See WorkerProcess."""
        return exit_reason(self._process)
