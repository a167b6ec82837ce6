"""How many threads compute, and the wait policy of torch's OpenMP threads (``GOMP_SPINCOUNT``).

torch's OpenMP threads spin for milliseconds while they wait. With another busy process on the same cores (the HTTP
process beside the engine, a client, a test) a spinning thread keeps the one it waits for from running: on two cores,
steps took 20 to 50 times as long. Sleeping at once costs two and a half times on an idle machine. Spinning for a few
microseconds does neither (docs/log.md). The setting is read when torch is imported, so it is put into the environment
by whoever starts a process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, MutableMapping

from aiakq.system.cgroups import processor_limit

#: Turns of GNU OpenMP's waiting loop before a thread sleeps.
SPIN_COUNT = "2000"


def available_threads() -> int:
    """Threads that compute in a process by default: OMP_NUM_THREADS, or the processors that this process may use,
    within its container's limit.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given):
        return int(given)
    return min(_processors(), threads_in_limit() or sys.maxsize)


def threads_in_limit() -> int | None:
    """Threads that compute all the time within this container's limit of processor time; None without a limit.

    Rounded down: with one more, all would be stopped for a part of every period, and the HTTP process with them.
    """
    limit = processor_limit()
    return None if limit is None else max(1, int(limit))


def limit_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set OMP_NUM_THREADS in ``environment`` where this container gets fewer processors than it sees, unless it is set.

    torch would start a thread for each that it sees.
    """
    limit = threads_in_limit()
    if limit is not None and limit < _processors():
        environment.setdefault("OMP_NUM_THREADS", str(limit))


def _processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set GOMP_SPINCOUNT in ``environment``, unless the user has set it or OMP_WAIT_POLICY."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


class RestoreThreads:
    """Called, it gives this process the threads, and the thread that made it the processors, that they had then.

    set_threads  torch.set_num_threads, with which ``threads`` were set.
    """

    def __init__(self, threads: int, set_threads: Callable[[int], object]) -> None:
        self._threads, self._set_threads = threads, set_threads
        self._cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._thread = threading.get_native_id()

    def __call__(self) -> None:
        self._set_threads(self._threads)
        if self._cpus:
            with contextlib.suppress(OSError):  # that thread has ended
                os.sched_setaffinity(self._thread, self._cpus)
