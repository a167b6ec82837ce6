"""AdapterChecks: reads and hashes the files of LoRA adapters in threads, concurrently with the engine's steps."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from aiakq.errors import AiakqError, error, one_line
from aiakq.runtime.engine.messages import ModelLimits
from aiakq.server.process.ipc import AdapterChecked, CheckAdapter, encode_error

#: Seconds that an idle engine waits for a check before it polls for messages again.
_PAUSE = 0.005


class AdapterChecks:
    """Checks of adapters against ``limits``."""

    def __init__(self, limits: ModelLimits) -> None:
        self._limits = limits.adapters
        self._threads: ThreadPoolExecutor | None = None
        self._running: list[Future[AdapterChecked]] = []

    def start(self, record: CheckAdapter) -> None:
        """Start checking an adapter."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "adapters")
        self._running.append(self._threads.submit(self._check, record))

    def done(self) -> list[AdapterChecked]:
        """Remove and return the finished checks."""
        ended = [each for each in self._running if each.done()]
        if ended:
            self._running = [each for each in self._running if each not in ended]
        return [each.result() for each in ended]

    def wait(self) -> bool:
        """Wait briefly if a check is running; return whether one is."""
        if self._running:
            wait(self._running, timeout=_PAUSE, return_when=FIRST_COMPLETED)
        return bool(self._running)

    def _check(self, record: CheckAdapter) -> AdapterChecked:
        from aiakq.runtime.lora.requests import check_adapter

        try:
            adapter = check_adapter(record.name, record.path, self._limits, record.root)
        except AiakqError as failure:
            return AdapterChecked(record.number, failure=encode_error(failure))
        except BaseException as problem:  # a panic of a native library is no Exception
            unreadable = error("adapter_malformed", adapter=record.name, reason=one_line(problem))
            return AdapterChecked(record.number, failure=encode_error(unreadable))
        return AdapterChecked(record.number, adapter)
