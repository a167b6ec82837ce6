"""FairQueue: jobs of several clients, which take turns by the time that their jobs have taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Job = TypeVar("Job")


class FairQueue(Generic[Job]):
    """Jobs by client. The next job is of the client that has used the least time while others waited.

    A client that comes, or comes back, starts level with the one served last: it neither saves up time nor owes any.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, deque[Job]] = {}  # in order of arrival of the clients
        self._used: dict[str, float] = {}  # of clients with jobs, and of those that are ahead of the others
        self._level = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def put(self, client: str, job: Job) -> None:
        """Add a job."""
        if client not in self._jobs:
            self._jobs[client] = deque()
            self._used[client] = max(self._used.get(client, 0.0), self._level)
        self._jobs[client].append(job)

    def pop(self, may_run: Callable[[Job], bool] = lambda job: True) -> tuple[str, Job] | None:
        """Remove and return the next client and its first job that may run; None if there is none."""
        for client in sorted(self._jobs, key=self._used.__getitem__):
            jobs = self._jobs[client]
            for at, job in enumerate(jobs):
                if may_run(job):
                    del jobs[at]
                    self._level = max(self._level, self._used[client])
                    if not jobs:
                        del self._jobs[client]
                    return client, job
        return None

    def charge(self, client: str, seconds: float) -> None:
        """Count the time that a job of ``client`` has taken."""
        self._used[client] = max(self._used.get(client, 0.0), self._level) + seconds
        behind = [name for name, used in self._used.items() if name not in self._jobs and used <= self._level]
        for name in behind:
            del self._used[name]

    def discard(self, is_unwanted: Callable[[Job], bool]) -> None:
        """Remove jobs whose results are no longer awaited."""
        for client in list(self._jobs):
            self._jobs[client] = deque(job for job in self._jobs[client] if not is_unwanted(job))
            if not self._jobs[client]:
                del self._jobs[client]
