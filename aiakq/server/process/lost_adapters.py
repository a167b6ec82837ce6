"""LostAdapters: requests whose LoRA adapter cannot be read again, because its files are being replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.server.process.request_stream import RequestStream

#: Seconds for which a request waits for the next version of its adapter to be loaded, if no load of it has begun.
REPLACEMENT_SECONDS = 10.0


class AdapterVersions(Protocol):
    """The adapters that requests may name."""

    def get(self, name: str | None) -> AdapterRef | None:
        """Return the version that new requests get, or None."""

    def may_change(self) -> bool:
        """Whether other versions may be loaded while the server runs."""

    def is_loading(self, name: str) -> bool:
        """Whether another version is being loaded."""


class LostAdapters:
    """Requests to be restarted with the next version of their adapter; none of their output has been read.

    versions  None if there are no adapters.
    restart   starts a request again, with its new adapter.
    """

    def __init__(self, restart: Callable[[RequestStream], None]) -> None:
        self.versions: AdapterVersions | None = None
        self._restart = restart
        self._waiting: dict[RequestStream, tuple[float, AiakqError]] = {}

    def keeps(self, stream: RequestStream) -> bool:
        """Whether a request that failed because of its adapter can be answered by another version as a whole."""
        adapter, versions = stream.request.options.adapter, self.versions
        if adapter is None or versions is None or stream.consumed:
            return False
        current = versions.get(adapter.name)
        return current is not None and (current.key != adapter.key or versions.may_change())

    def add(self, stream: RequestStream, failure: AiakqError) -> None:
        """Restart a request that ``keeps`` returned True for, now or when the next version has been loaded; it fails
        with ``failure`` if none is.
        """
        self._waiting[stream] = time.monotonic() + REPLACEMENT_SECONDS, failure
        self.update(time.monotonic())

    def update(self, now: float) -> None:
        """Restart the requests whose adapter has been replaced, and fail those that have waited for too long."""
        for stream, (deadline, failure) in list(self._waiting.items()):
            adapter, versions = stream.request.options.adapter, self.versions
            assert adapter is not None and versions is not None
            current = versions.get(adapter.name)
            is_replaced = current is not None and current.key != adapter.key
            if not (is_replaced or current is None or (now > deadline and not versions.is_loading(adapter.name))):
                continue
            del self._waiting[stream]
            if is_replaced:
                stream.use_adapter(current)
                self._restart(stream)
            else:
                stream.fail(failure)

    def discard(self, stream: RequestStream) -> None:
        """Forget a request that has ended, or that another engine restarts."""
        self._waiting.pop(stream, None)
