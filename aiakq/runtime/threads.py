"""How the threads of torch wait for each other.

torch's OpenMP threads spin while they wait. With another busy process on the same cores (the HTTP process beside the
engine, a client, a test) a spinning thread keeps the one it waits for from running: on two cores, steps took 20 to 30
times as long (docs/log.md). Waiting without spinning costs microseconds and does not collapse. The setting is read when
torch is imported, so it is put into the environment by whoever starts a process.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping


def wait_without_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set OMP_WAIT_POLICY to PASSIVE in ``environment``, unless the user has set it or GOMP_SPINCOUNT."""
    if "OMP_WAIT_POLICY" not in environment and "GOMP_SPINCOUNT" not in environment:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
