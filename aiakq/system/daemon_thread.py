"""Blocking calls in threads that nothing waits for at the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, cast

Result = TypeVar("Result")


async def in_daemon_thread(function: Callable[[], Result]) -> Result:
    """Run ``function`` in a thread that does not prevent the process from exiting, and return its result.

    If the caller is cancelled, the thread goes on, and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Result] = loop.create_future()

    def finish(value: Result | None, failure: BaseException | None) -> None:
        if not result.done():
            if failure is None:
                result.set_result(cast(Result, value))
            else:
                result.set_exception(failure)

    def run() -> None:
        try:
            value, failure = function(), None
        except BaseException as exception:
            value, failure = None, exception
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(finish, value, failure)

    threading.Thread(target=run, daemon=True).start()
    return await result
