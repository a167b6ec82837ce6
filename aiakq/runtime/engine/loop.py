"""The engine loop, shared by ``LLM`` and the engine process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait

from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.protocol.command import Inbox
from aiakq.runtime.protocol.output import StepOutput
from aiakq.system.memory import rare_collections

#: Seconds to wait for a preparation before polling for messages again, while nothing can run without it.
_PAUSE = 0.005


def timed_step(engine: Engine, inbox: Inbox) -> StepOutput:
    """Run one step by the monotonic clock; its tokens get the time at which the step ended."""
    began = time.monotonic()
    output = engine.step(began, inbox)
    output.date(began, time.monotonic())
    return output


def run(engine: Engine, receive: Callable[[bool], Inbox | None], deliver: Callable[[StepOutput], None]) -> None:
    """Run steps of ``engine`` while there is work, until ``receive`` returns None.

    receive  returns the messages that arrived since the last call; its argument is true if the engine is idle, and then
             it may block.
    deliver  called with the output of every step, including those without tokens, so that gauges stay up to date.
    """
    with rare_collections():
        _run(engine, receive, deliver)


def _run(engine: Engine, receive: Callable[[bool], Inbox | None], deliver: Callable[[StepOutput], None]) -> None:
    while True:
        busy = engine.has_work()
        # A leak is detected as soon as the engine is idle, before it runs out of pages.
        assert busy or engine.stats.num_free_pages == engine.stats.num_pages, "a page has leaked"
        if engine.is_stalled() and (preparations := engine.preparations()):
            wait(preparations.values(), timeout=_PAUSE, return_when=FIRST_COMPLETED)
        inbox = receive(not busy)
        if inbox is None:
            return
        done = [command for command, ready in engine.preparations().items() if ready.done()]
        if done:
            inbox = [*inbox, *done]
        if busy or inbox:
            deliver(timed_step(engine, inbox))
