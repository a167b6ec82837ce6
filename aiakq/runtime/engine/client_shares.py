"""ClientShares: how many tokens each client was served, from which the next one to serve is chosen.

After Sheng et al., "Fairness in Serving Large Language Models" (arXiv:2401.00588): every client has a counter of the
tokens it was served, and the client with the lowest counter is served first. Differences from the paper's VTC:

- Clients compete not only for the admission of waiting requests, but for every piece of a step: one decode token, or a
  few prompt tokens. A long prompt in progress therefore does not hold up another client's request.
- A client whose whole demand is met by a step, or which only waits for pages, does not accumulate credit: its counter
  is raised to the lowest counter of the clients that want more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

#: Weight of a generated token in a client's counter; a prompt token has weight 1.
OUTPUT_WEIGHT = 2


class ClientShares:
    """The clients with waiting or running sequences.

    counters  weighted tokens served to each client, since several clients have had sequences.
    """

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self._live: Counter[str] = Counter()
        self._min_counter = 0  # lowest counter of the clients that want more

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def add(self, client: str) -> None:
        """Count a new sequence of ``client``."""
        if client not in self._live:
            self.counters[client] = max(self.counters.get(client, 0), self._min_counter)
        self._live[client] += 1

    def remove(self, client: str) -> None:
        """Count the end of a sequence of ``client``."""
        self._live[client] -= 1
        if not self._live[client]:
            del self._live[client]
            if len(self._live) < 2:
                self._reset()

    def charge(self, served: Iterable[tuple[str, int]], unserved: set[str]) -> None:
        """Add the weighted tokens of a step to the counters, and raise those of clients that want no more.

        unserved  clients that want more than the step gave them.
        """
        if not unserved:
            self._reset()
            return
        for client, weight in served:
            self.counters[client] += weight
        self._min_counter = min(self.counters[client] for client in unserved)
        for client, counter in list(self.counters.items()):
            if client in self._live:
                self.counters[client] = max(counter, self._min_counter if client not in unserved else counter)
            elif counter <= self._min_counter:
                del self.counters[client]

    def _reset(self) -> None:
        self.counters = dict.fromkeys(self._live, 0)
        self._min_counter = 0
