"""Service: the served model and the state of its server, as handlers of requests see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.media import MediaKind
from aiakq.server.api.model_info import ModelInfo
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.service_options import (
    MIN_AUDIO_BODY_BYTES,
    MIN_BODY_BYTES,
    MIN_IMAGE_BODY_BYTES,
    MIN_TOTAL_IMAGE_BYTES,
    ServiceOptions,
)
from aiakq.server.errors import copy_error
from aiakq.server.process.replicas import Requests
from aiakq.server.process.text_client import TextClient
from aiakq.server.telemetry.metrics import Metrics
from aiakq.server.telemetry.request_records import RequestObserver


@dataclass
class ServerState:
    """The state of the server.

    manager        requests in the engines.
    text           text workers.
    progress       progress of loading, for /ready.
    observers      notified of every generation request.
    num_in_flight  number of unfinished generation requests.
    closing        error for new requests during shutdown, or None.
    """

    manager: Requests
    text: TextClient
    metrics: Metrics
    progress: Callable[[], dict[str, object]]
    observers: Sequence[RequestObserver] = ()
    num_in_flight: int = 0
    closing: AiakqError | None = None

    async def stop(self, seconds: float) -> None:
        """Stop the text workers, and give observers up to ``seconds`` to flush."""
        await self.text.stop()
        await asyncio.gather(*(asyncio.to_thread(observer.stop, seconds) for observer in self.observers))

    def check_available(self) -> None:
        """Raise an error if nothing can be generated, because there is no engine or the server is shutting down."""
        failure = self.manager.failure or self.closing
        if failure is not None:
            raise copy_error(failure)

    def check_open(self) -> None:
        """Raise an error if the server is shutting down."""
        if self.closing is not None:
            raise copy_error(self.closing)

    def check_healthy(self) -> None:
        """Call ``check_available``, and raise ``tokenizer_stuck`` if the tokenizer does not respond."""
        self.check_available()
        self.text.check()


@dataclass(frozen=True)
class Service:
    """One served model and the server's state.

    model     the model as clients see it.
    renderer  turns texts and conversations into prompts.
    state     engines, text workers, and unfinished requests.
    options   options of the server.
    created   when the server started, in seconds since 1970.
    """

    model: ModelInfo
    renderer: Renderer
    state: ServerState
    options: ServiceOptions
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def max_body_bytes(self) -> int:
        """Maximum size of a request body."""
        limits = self.model.limits
        least = MIN_BODY_BYTES if limits.media.refusal else MIN_IMAGE_BODY_BYTES
        least = least if limits.speech is None else MIN_AUDIO_BODY_BYTES
        return self.options.max_body_bytes or max(least, 8 * limits.max_model_len)

    @cached_property
    def max_total_body_bytes(self) -> int:
        """Maximum size of all request bodies and media in memory."""
        limits = self.model.limits
        least = 0 if limits.media.refusal and limits.speech is None else MIN_TOTAL_IMAGE_BYTES
        return self.options.max_total_body_bytes or max(least, 32 * self.max_body_bytes)

    @property
    def max_media(self) -> dict[MediaKind, int]:
        """Kinds of media that are read and can be preprocessed -> maximum number of items of a prompt."""
        media, failures = self.model.limits.media, self.renderer.text.loaded.media_failures
        return {kind: media.max_items[kind] for kind in media.kinds if kind not in failures}

    @cached_property
    def max_values(self) -> int:
        """Number of values that a request body may have at least, such as token ids."""
        return 2 * self.model.limits.max_model_len
