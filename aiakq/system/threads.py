"""The number of compute threads, and the wait policy of torch's OpenMP threads (``GOMP_SPINCOUNT``).

torch's OpenMP threads spin for milliseconds while they wait. If another process is busy on the same cores (the HTTP
process beside the engine, a client, a test), a spinning thread blocks the thread it waits for: on two cores, steps took
20 to 50 times as long. Sleeping immediately makes steps 2.5 times slower on an idle machine. Spinning for a few
microseconds avoids both (docs/log.md). The setting is read when torch is imported, so it is set in the environment of
a process before it starts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, MutableMapping

from aiakq.system.cgroups import processor_limit

#: Iterations of GNU OpenMP's spin loop before a thread sleeps.
SPIN_COUNT = "2000"


def available_threads() -> int:
    """Return the default number of compute threads: OMP_NUM_THREADS, or the processors within the CPU limit."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given):
        return int(given)
    return min(_processors(), threads_in_limit() or sys.maxsize)


def threads_in_limit() -> int | None:
    """Return the number of threads that can run continuously within the container's CPU limit; None without a limit.

    It is rounded down: with one more, all threads and the HTTP process would be throttled in every period.
    """
    limit = processor_limit()
    return None if limit is None else max(1, int(limit))


def limit_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set OMP_NUM_THREADS in ``environment`` if the CPU limit is below the visible processors, unless it is set.

    torch would start a thread per visible processor.
    """
    limit = threads_in_limit()
    if limit is not None and limit < _processors():
        environment.setdefault("OMP_NUM_THREADS", str(limit))


def _processors() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set GOMP_SPINCOUNT in ``environment``, unless it or OMP_WAIT_POLICY is set."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


class RestoreThreads:
    """Restores, when called, the number of threads, and the CPU affinity of the thread that created it.

    set_threads  torch.set_num_threads, to restore ``threads``.
    """

    def __init__(self, threads: int, set_threads: Callable[[int], object]) -> None:
        self._threads, self._set_threads = threads, set_threads
        self._cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._thread = threading.get_native_id()

    def __call__(self) -> None:
        self._set_threads(self._threads)
        if self._cpus:
            with contextlib.suppress(OSError):  # the thread has exited
                os.sched_setaffinity(self._thread, self._cpus)
