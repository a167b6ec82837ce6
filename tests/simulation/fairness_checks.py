"""What must hold between the clients of a simulated engine after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from clients import must
from sizes import Setup

from aiakq.runtime.engine.client_shares import OUTPUT_WEIGHT
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.engine.step_builder import QUANTUM

Place = Callable[[Sequence], tuple[int, int]]


class FairnessChecks:
    """Checks of one scheduler.

    behind  by pairs of clients, how much more the second was served since the first wants more than it gets, whatever
            it has of it running: of what waits it also depends on pages and slots.
    """

    def __init__(self, scheduler: Scheduler, setup: Setup) -> None:
        self.scheduler, self.setup = scheduler, setup
        self.behind: Counter[tuple[str, str]] = Counter()

    def check(self, before: list[tuple[Sequence, int, int]], rows: list[ScheduledChunk], place: Place) -> None:
        """``before`` ran before the step: with its uncomputed tokens and its preemptions. ``rows`` are the step."""
        self._check_order(before, rows, place)
        served: Counter[str] = Counter()
        for row in rows:
            answers = row.count == 1 and row.completes
            served[row.sequence.client] += OUTPUT_WEIGHT if answers else row.count
        preempted = any(one.num_preemptions > times for one, _, times in before)
        config = self.setup.scheduler
        bounded = not config.long_prefill_token_threshold and config.enable_chunked_prefill
        if not bounded or preempted or len({one.spec.options.priority for one, _, _ in before}) > 1:
            self.behind.clear()
            return
        counts, running = {row.sequence: row.count for row in rows}, set(self.scheduler.running)
        wanting = {one.client for one, missing, _ in before if missing > counts.get(one, 0) and one in running}
        clients = wanting | served.keys() | {one.client for one in self.scheduler.waiting}
        for first in clients:
            for second in clients - {first}:
                behind = max(0, self.behind[first, second] + served[second] - served[first])
                self.behind[first, second] = behind if first in wanting else 0
        most = 2 * (QUANTUM + OUTPUT_WEIGHT * (1 + self.setup.max_num_seqs))
        for (first, second), behind in self.behind.items():
            must(behind <= most, f"{first} got {behind} tokens less than {second} although it wanted more")

    def _check_order(self, before: list[tuple[Sequence, int, int]], rows: list[ScheduledChunk], place: Place) -> None:
        """Among the requests of a client, and of a priority, the first is served first and preempted last."""
        known = {one for one, _, _ in before}
        in_step = {row.sequence for row in rows}
        running, waiting = self.scheduler.running, self.scheduler.waiting
        for client in {one.client for one in (*running, *waiting)}:
            started = [place(one) for one in running if one not in known and one.client == client]
            waits = [place(one) for one in waiting if one.client == client]
            if started and waits and not self.setup.overtaking:
                must(max(started) < min(waits), "a request was overtaken by one of its client")
            answers = [
                one in in_step
                for one, missing, times in before
                if missing == 1 and one.client == client and one.num_preemptions == times and one in running
            ]
            must(answers == sorted(answers, reverse=True), "a later answer got a token before an earlier one")
            victims = [place(one) for one, _, times in before if one.num_preemptions > times and one.client == client]
            stayed = [place(one) for one in running if one in known and one.client == client]
            # The first of all is never preempted.
            stayed = [one for one in stayed if one != min(map(place, running))]
            must(not victims or not stayed or max(stayed) < min(victims), "pages were taken from who came first")
