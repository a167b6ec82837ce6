"""Invariants of fairness between the clients of a simulated engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from simulation_config import SimulationConfig
from tracked_requests import require

from aiakq.runtime.engine.client_shares import OUTPUT_WEIGHT
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.engine.step_builder import QUANTUM

Priority = Callable[[Sequence], tuple[int, int]]


class FairnessChecks:
    """Checks of one scheduler.

    deficits  by pairs of clients: the service that the second received beyond the first, since the first has running
              sequences with more uncomputed tokens than it is scheduled. Waiting sequences do not count, because they
              also depend on free pages and slots.
    """

    def __init__(self, scheduler: Scheduler, config: SimulationConfig) -> None:
        self.scheduler, self.config = scheduler, config
        self.deficits: Counter[tuple[str, str]] = Counter()

    def check(self, before: list[tuple[Sequence, int, int]], rows: list[ScheduledChunk], priority: Priority) -> None:
        """Check a step of ``rows``.

        ``before`` lists the sequences that ran before, with their uncomputed tokens and number of preemptions.
        """
        self._check_order(before, rows, priority)
        served: Counter[str] = Counter()
        for row in rows:
            is_decode = row.count == 1 and row.completes
            served[row.sequence.client] += OUTPUT_WEIGHT if is_decode else row.count
        preempted = any(one.num_preemptions > times for one, _, times in before)
        config = self.config.scheduler
        bounded = not config.long_prefill_token_threshold and config.enable_chunked_prefill
        if not bounded or preempted or len({one.spec.options.priority for one, _, _ in before}) > 1:
            self.deficits.clear()
            return
        counts, running = {row.sequence: row.count for row in rows}, set(self.scheduler.running)
        wanting = {one.client for one, missing, _ in before if missing > counts.get(one, 0) and one in running}
        clients = wanting | served.keys() | {one.client for one in self.scheduler.waiting}
        for first in clients:
            for second in clients - {first}:
                deficit = max(0, self.deficits[first, second] + served[second] - served[first])
                self.deficits[first, second] = deficit if first in wanting else 0
        limit = 2 * (QUANTUM + OUTPUT_WEIGHT * (1 + self.config.max_num_seqs))
        for (first, second), deficit in self.deficits.items():
            require(deficit <= limit, f"{first} got {deficit} tokens less than {second} although it wanted more")

    def _check_order(
        self, before: list[tuple[Sequence, int, int]], rows: list[ScheduledChunk], priority: Priority
    ) -> None:
        """Check that of a client's requests of one priority the first is served first and preempted last."""
        known = {one for one, _, _ in before}
        in_step = {row.sequence for row in rows}
        running, waiting = self.scheduler.running, self.scheduler.waiting
        for client in {one.client for one in (*running, *waiting)}:
            started = [priority(one) for one in running if one not in known and one.client == client]
            waits = [priority(one) for one in waiting if one.client == client]
            if started and waits and not self.config.allows_overtaking:
                require(max(started) < min(waits), "a request was overtaken by another one of its client")
            decodes = [
                one in in_step
                for one, missing, times in before
                if missing == 1 and one.client == client and one.num_preemptions == times and one in running
            ]
            require(decodes == sorted(decodes, reverse=True), "a later sequence got a token before an earlier one")
            victims = [
                priority(one) for one, _, times in before if one.num_preemptions > times and one.client == client
            ]
            stayed = [priority(one) for one in running if one in known and one.client == client]
            # The first request of all clients is never preempted.
            stayed = [one for one in stayed if one != min(map(priority, running))]
            require(not victims or not stayed or max(stayed) < min(victims), "an earlier request was preempted")
