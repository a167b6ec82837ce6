"""CPU load of other processes on this machine: timings taken while it is high are repeated."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

#: The largest share of the CPU time that other processes may use during a measurement.
MAX_OTHERS_SHARE = 0.1


@dataclass
class CpuTime:
    """CPU seconds since boot: used by all processes, used by children of this process, and available."""

    total: float
    children: float
    capacity: float

    @classmethod
    def now(cls) -> CpuTime:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        second = os.sysconf("SC_CLK_TCK")
        mine = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls((sum(ticks) - ticks[3] - ticks[4]) / second, mine.ru_utime + mine.ru_stime, sum(ticks) / second)

    def others_share(self, before: CpuTime) -> float:
        """The share of the CPU time since ``before`` that other processes used, 0 to 1."""
        used = self.total - before.total - (self.children - before.children)
        return max(0.0, used / max(1e-9, self.capacity - before.capacity))


def wait_until_idle(timeout: float) -> None:
    """Wait until other processes use little CPU time, for at most ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        before = CpuTime.now()
        time.sleep(1)
        if CpuTime.now().others_share(before) < MAX_OTHERS_SHARE:
            break
