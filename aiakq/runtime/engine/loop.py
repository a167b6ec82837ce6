"""The engine loop, shared by ``LLM`` and the engine process."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.messages import Inbox, StepOutput


def timed_step(engine: Engine, inbox: Inbox) -> StepOutput:
    """One step on the monotonic clock; its tokens are dated to its end."""
    began = time.monotonic()
    output = engine.step(began, inbox)
    output.date(began, time.monotonic())
    return output


def run(engine: Engine, receive: Callable[[bool], Inbox | None], deliver: Callable[[StepOutput], None]) -> None:
    """Step ``engine`` while there is work, until ``receive`` returns None.

    receive  returns what arrived since the last call. If its argument is true the engine is idle, and it may wait.
    deliver  takes the output of every step, also of one without a token, so that gauges stay exact.
    """
    while True:
        busy = engine.has_work()
        # Cheap enough for every step: an idle engine that has lost a page ends instead of running out of pages later.
        assert busy or engine.stats.num_free_pages == engine.stats.num_pages, "a page is lost"
        inbox = receive(not busy)
        if inbox is None:
            return
        if busy or inbox:
            deliver(timed_step(engine, inbox))
