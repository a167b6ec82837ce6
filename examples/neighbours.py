"""How busy everybody else keeps this machine: what is timed beside a busy neighbour is timed again."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

#: Others who use more of the machine than this disturb what is timed.
NOISY = 0.1


@dataclass
class Used:
    """Processor seconds since the machine started: of everybody, of children of this process, and all there were."""

    everybody: float
    children: float
    all: float

    @classmethod
    def now(cls) -> Used:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        second = os.sysconf("SC_CLK_TCK")
        mine = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls((sum(ticks) - ticks[3] - ticks[4]) / second, mine.ru_utime + mine.ru_stime, sum(ticks) / second)

    def by_others(self, before: Used) -> float:
        """The part of the machine that others have used since ``before``, 0 .. 1."""
        used = self.everybody - before.everybody - (self.children - before.children)
        return max(0.0, used / max(1e-9, self.all - before.all))


def wait_until_quiet(patience: float) -> None:
    """Wait until others leave this machine alone, for at most so many seconds."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        before = Used.now()
        time.sleep(1)
        if Used.now().by_others(before) < NOISY:
            break
