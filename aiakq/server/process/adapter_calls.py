"""AdapterCalls: requests to the engine process to check and prefetch LoRA adapters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from weakref import WeakValueDictionary

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.server.errors import copy_error
from aiakq.server.process.ipc import AdapterChecked, CheckAdapter, PrefetchAdapter, ToEngine


class AdapterCalls:
    """Calls to one engine; ``send`` is None while no engine is running."""

    def __init__(self) -> None:
        self.send: Callable[[ToEngine], None] | None = None
        self._failure: AiakqError | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[AdapterRef]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def check(self, name: str, path: str, root: str | None, client: str = "") -> AdapterRef:
        """Check the adapter at ``path`` and return it; the engine has one adapter of each client to check at a time.

        Raises what ``runtime.lora.requests.check_adapter`` raises, or the error for which no engine is running.
        """
        turn = self._turns.setdefault(client, asyncio.Lock())
        async with turn:
            return await self._checked(name, path, root)

    async def prefetch(self, adapter: AdapterRef) -> None:
        """Have the engine read ``adapter`` before any request names it.

        Raises ``adapters_in_use``, why it cannot be read, or the error for which no engine is running.
        """
        await self._answer(lambda number: PrefetchAdapter(number, adapter))

    async def _checked(self, name: str, path: str, root: str | None) -> AdapterRef:
        return await self._answer(lambda number: CheckAdapter(number, name, path, root))

    async def _answer(self, record: Callable[[int], CheckAdapter | PrefetchAdapter]) -> AdapterRef:
        if self.send is None:
            assert self._failure is not None, "the engine is ready before adapters are loaded"
            raise copy_error(self._failure)
        number = next(self._numbers)
        future: asyncio.Future[AdapterRef] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self.send(record(number))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    def on_checked(self, record: AdapterChecked) -> None:
        """Handle the engine's reply to ``check`` or ``prefetch``."""
        future = self._waiting.get(record.number)
        if future is None or future.done():
            return
        if record.adapter is not None:
            future.set_result(record.adapter)
        elif record.failure is not None:
            future.set_exception(record.failure.error())

    def on_engine_end(self, failure: AiakqError) -> None:
        """Fail all pending calls, because the engine has ended."""
        self.send, self._failure = None, failure
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(copy_error(failure))
