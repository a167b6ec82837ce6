"""TextClient: tokenizes texts and renders chat templates in worker processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import msgspec

from aiakq.arguments.server import KEY_VARIABLES
from aiakq.errors import AiakqError, error
from aiakq.runtime.config.multimodal import MultimodalConfig
from aiakq.runtime.config.speech import SpeechConfig
from aiakq.runtime.protocol.grammar import Grammar, not_enforceable
from aiakq.runtime.protocol.media import PLURALS
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.vocabulary import end_failure
from aiakq.runtime.text.tokenizer import NoTokenizer, TokenDecoder, Tokenizer
from aiakq.runtime.text.tokenizer_source import TokenizerSource
from aiakq.server.process.text_messages import (
    MAX_MEDIA_SECONDS,
    MAX_SECONDS,
    MAX_SECONDS_PER_CHAR,
    WITHOUT_TORCH,
    Drop,
    Loaded,
    Setup,
    TextReply,
    TextRequest,
    ToTextProcess,
    size_of,
)
from aiakq.server.process.worker_queue import TextWorkerChannel, WorkerQueue
from aiakq.system.async_channel import AsyncChannel
from aiakq.system.channel import Disconnected, InvalidMessage, framed
from aiakq.system.child import Child, child_command, is_stopped
from aiakq.system.daemon_thread import in_daemon_thread

logger = logging.getLogger("aiakq.server")

_CODE = "from aiakq.server.process.text_process import main; main()"
#: What logs call the process.
_PROCESS = "The tokenizer's process"
#: Number of workers.
NUM_WORKERS = 4
LONG_CHARS = 1 << 15
#: Seconds to wait for a reply beyond a worker's own limit, before it is replaced, and for that, before all workers are.
_EXTRA_SECONDS, _REPLACE_SECONDS = 20.0, 5.0
#: Grammars that are known to be enforceable: maximum number, and maximum characters of each.
_MAX_KEPT_GRAMMARS, _MAX_KEPT_CHARS = 512, 1 << 15
#: Seconds between two ``Drop`` messages for a request.
_DROP_SECONDS = 0.2
#: Seconds after which the tokenizer counts as stuck if a short text is not done.
STUCK_SECONDS = 10.0
#: Seconds after which a request that waits looks whether the process is stopped.
_STOPPED_SECONDS = 1.2 * STUCK_SECONDS
#: Seconds for a process that closed its sockets to exit.
_EXIT_SECONDS = 0.5
#: Seconds for a tokenizer to load.
_LOAD_SECONDS = 300.0
#: Probe texts, which every tokenizer must be able to process.
_PROBES = (
    "hi",
    "",
    " ",
    "a" * 2000,
    " " * 2000,
    "\n" * 200,
    "a b " * 500,
    "0123456789" * 100,
    "<é世\U0001f600>\t" * 100,
)

#: The client of the current request, by API key or address, for round-robin scheduling.
client_of_request: ContextVar[str] = ContextVar("client_of_request", default="")


class TextClient:
    """Tokenization, detokenization and chat template rendering in worker processes.

    loaded      description of the tokenizer, from the process.
    tokenizer   tokenizer in this process, used to decode single tokens and short pieces; it does not encode.
    with_torch  whether the process may import torch, for tokenizers with code of their own.
    end_failure  why no grammar can be enforced with the end-of-sequence tokens of the model, or "".
    on_loss     called when the process, or a worker with a request, has ended unexpectedly or hung, and is replaced.
    """

    def __init__(
        self,
        template: str | None,
        max_chars: int,
        with_torch: bool = False,
        content_format: str = "auto",
        template_source: str = "of --chat-template",
        template_arguments: dict[str, object] | None = None,
    ) -> None:
        """For the last three, see ``Setup``."""
        self.with_torch = with_torch
        self.loaded = Loaded()
        self.end_failure = ""
        self.on_loss: Callable[[], None] = lambda: None
        self.tokenizer: Tokenizer = NoTokenizer()
        self._setup = Setup(TokenizerSource("", left_out=True), template, max_chars, content_format, template_source)
        self._setup.template_arguments = template_arguments or {}
        self._is_set_up = False
        self._queue = WorkerQueue()
        self._process: Child | None = None
        self._control: AsyncChannel[ToTextProcess, Loaded] | None = None
        self._workers: list[AsyncChannel[TextRequest, TextReply]] = []
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._checked_grammars: dict[Grammar, int] = {}  # their sizes
        self._dropping: set[asyncio.Future[None]] = set()
        self._short_since: dict[int, float] = {}  # arrival times of unfinished short requests

    @property
    def speech(self) -> SpeechConfig | None:
        """How the model transcribes audio; None if it does not."""
        return self._setup.speech

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self.loaded.has_template

    def describe(self) -> str:
        """Description of the tokenizer for the start-up table."""
        return self.loaded.description or self.tokenizer.describe()

    def check(self) -> None:
        """Raise ``tokenizer_stuck`` if a short text takes too long."""
        first = next(iter(self._short_since.values()), None)
        if first is not None and time.monotonic() - first > STUCK_SECONDS:
            raise error("tokenizer_stuck", limit=STUCK_SECONDS)

    def check_ends(self, eos_ids: Sequence[int]) -> None:
        """Set ``end_failure`` for the end-of-sequence tokens of the model."""
        self.end_failure = ""
        if self.loaded.vocabulary and not self.tokenizer.special_ids.issuperset(eos_ids):
            vocabulary = msgspec.msgpack.decode(self.loaded.vocabulary, type=Vocabulary)
            self.end_failure = end_failure(vocabulary, self.tokenizer, eos_ids)

    async def load(
        self, source: TokenizerSource, media: MultimodalConfig | None = None, speech: SpeechConfig | None = None
    ) -> None:
        """Load the tokenizer and probe it; ``media`` and ``speech`` say how the model reads media and transcribes
        audio, if it does.

        Raises the errors of ``TokenizerSource.load``.
        """
        self._setup.source, self._setup.media, self._setup.speech = source, media, speech
        if source.left_out:
            return
        await self.start()
        for probe in _PROBES:
            try:
                await self.encode([probe])
            except AiakqError as failure:
                await self.stop()
                reason = failure.fields.get("reason") or str(failure.message).rstrip(".")
                shown = repr(probe[:8] + ("..." if len(probe) > 8 else ""))
                file = f"the tokenizer in '{self._setup.source.folder}'"
                raise error("model_malformed", file=file, reason=f"it fails on {shown}: {reason}") from None
        if self.loaded.decoder:
            self.tokenizer = TokenDecoder(self.loaded.decoder)
        else:  # in Python, and proven in the process; a thread of its own, which does not delay the end
            self.tokenizer = await in_daemon_thread(self._setup.source.load)
        self.loaded.decoder = ""

    async def encode(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        max_chars: int | None = None,
        max_ids: int | None = None,
    ) -> TextReply:
        """Tokenize ``texts``; see ``TextRequest``. Raises ``no_tokenizer`` or ``tokenization``."""
        request = TextRequest(
            0, texts=list(texts), add_special_tokens=add_special_tokens, max_chars=max_chars, max_ids=max_ids
        )
        return await self.run(request)

    async def check_grammar(self, grammar: Grammar, param: str) -> Grammar:
        """Return ``grammar`` with its client, and the memory that it takes.

        Raises ``grammar_not_enforceable`` for a grammar that cannot be enforced, or not within limits.
        """
        reply = await self.compile_grammar(grammar)
        if reply.failure:
            raise not_enforceable(param, reply.failure)
        return msgspec.structs.replace(grammar, num_bytes=reply.num_bytes, client=client_of_request.get())

    async def compile_grammar(self, grammar: Grammar) -> TextReply:
        """Compile ``grammar`` in a worker; the reply has a ``failure`` if it cannot be enforced."""
        num_bytes = self._checked_grammars.get(grammar)
        if num_bytes is not None:
            return TextReply(0, num_bytes=num_bytes)
        reply = await self._run_grammar(TextRequest(0, grammar=grammar))
        if not reply.failure and len(grammar.text) <= _MAX_KEPT_CHARS:
            self._checked_grammars[grammar] = reply.num_bytes
            if len(self._checked_grammars) > _MAX_KEPT_GRAMMARS:
                del self._checked_grammars[next(iter(self._checked_grammars))]
        return reply

    async def relax_schema(self, schema: object, grammar: Grammar) -> TextReply:
        """Make ``schema`` enforceable, with the options of ``grammar``; see ``TextRequest.relaxed_schema``."""
        options = msgspec.structs.replace(grammar, kind="json", text="")
        return await self._run_grammar(TextRequest(0, grammar=options, relaxed_schema=json.dumps(schema)))

    async def _run_grammar(self, request: TextRequest) -> TextReply:
        if self._setup.source.left_out:
            raise error("no_tokenizer")
        if failure := self.loaded.grammar_failure or self.end_failure:
            return TextReply(0, failure=failure, failed="grammar")
        return await self._replied(request)

    async def run(self, request: TextRequest) -> TextReply:
        """Run ``request`` on a worker and return the reply. If the caller is cancelled, the request is dropped.

        Raises no_tokenizer, no_chat_template, no_default_template, chat_template, template_loses, template_unusable,
        tokenization, invalid_type, media_refused, worker_lost.
        """
        if self._setup.source.left_out:
            raise error("no_tokenizer")
        if request.media and self.loaded.media_failure is not None:
            raise self.loaded.media_failure.error()
        if request.audio is not None and self.loaded.audio_failure is not None:
            raise self.loaded.audio_failure.error()
        if request.messages is not None:
            if not self.loaded.has_template:
                raise error("no_chat_template")
            if failure := self.loaded.template_failure(with_tools="tools" in request.arguments):
                raise failure
        reply = await self._replied(request)
        if reply.error is not None:
            raise reply.error.error()
        if reply.failure and request.media and (reply.failed == "image" or reply.failed == "audio"):
            named = "images and videos" if any(each.frames for each in request.media) else PLURALS[reply.failed]
            raise error("media_refused", param="messages", reason=f"preprocessing its {named} failed: {reply.failure}")
        if reply.failure and reply.failed == "audio":
            raise error("media_refused", param="file", reason=reply.failure)
        if reply.failure and reply.failed == "template":
            raise error("chat_template", reason=reply.failure)
        if reply.failure:
            raise error("tokenization", reason=reply.failure)
        return reply

    async def _replied(self, request: TextRequest) -> TextReply:
        """Return the reply to ``request``, which is repeated once if its worker is lost. Raises ``worker_lost``."""
        size = size_of(request)
        for _ in range(2):
            request.number = next(self._numbers)
            frame = framed(request)  # before anything else, because it can fail
            try:
                if not _is_long(request, size):
                    self._short_since[request.number] = time.monotonic()
                await self.start()
                reply = await self._request(request, frame, size)
            except (TimeoutError, ConnectionError, InvalidMessage):
                continue
            finally:
                self._short_since.pop(request.number, None)
            if not reply.is_lost:
                return reply
            self._report_loss("A worker of the tokenizer's process", "it was killed")
        raise error("worker_lost")

    async def start(self) -> None:
        """Start the process unless it is running. Raises the error that the tokenizer failed to load with."""
        if self._is_running and not self._starting.locked():
            return
        async with self._starting:
            if self._is_running:
                return
            if self._is_set_up and self._process is not None:  # it ended while no request was waiting for it
                self._report_loss(_PROCESS, self._process.exit_reason(0))
            self._queue.clear()
            try:
                async with asyncio.timeout(_LOAD_SECONDS):
                    await self._set_up()
            except (TimeoutError, ConnectionError, InvalidMessage) as failure:
                await self.stop()
                late = isinstance(failure, TimeoutError)
                reason = f"it took longer than {_LOAD_SECONDS:g} s to load" if late else "it ended the process"
                file = f"the tokenizer in '{self._setup.source.folder}'"
                raise error("model_malformed", file=file, reason=reason) from None
            except BaseException:
                await self.stop()
                raise

    @property
    def _is_running(self) -> bool:
        return self._is_set_up and self._has_process

    @property
    def _has_process(self) -> bool:
        return self._process is not None and self._process.process.poll() is None

    async def stop(self) -> None:
        """Stop the process and its workers."""
        self._is_set_up = False
        process, self._process = self._process, None
        self._queue.clear()
        for channel in (self._control, *self._workers):
            if channel is not None:
                channel.close()
        if process is not None:
            process.kill()
            await process.end_soon()

    async def _replace(self, process: Child, failure: Exception) -> None:
        """Stop the process, with which a request failed; the next request starts another one."""
        self._process = None  # so that other requests do not report it as well
        await self.stop()
        reason = "it does not respond"
        if not isinstance(failure, TimeoutError):
            has_exited = await process.exited(_EXIT_SECONDS)
            reason = process.exit_reason(0) if has_exited else f"it sent no valid reply ({failure!r})"
        self._report_loss(_PROCESS, reason)
        process.kill()
        await process.end_soon()

    def _report_loss(self, what: str, reason: str) -> None:
        logger.warning("%s is replaced: %s", what, reason)
        self.on_loss()

    async def spawn(self) -> None:
        """Start the process before ``load``, so that it can import libraries meanwhile."""
        environment = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
        environment["TOKENIZERS_PARALLELISM"] = "false"  # threads would not survive a fork
        if not self.with_torch:
            environment["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that models need torch
        command = child_command(_CODE, *([] if self.with_torch else [WITHOUT_TORCH]))
        self._process = Child(command, environment, num_sockets=1 + NUM_WORKERS)
        control, *workers = self._process.sockets
        self._control = await AsyncChannel[ToTextProcess, Loaded].open(control, Loaded)
        self._workers = [await AsyncChannel[TextRequest, TextReply].open(worker, TextReply) for worker in workers]

    async def _set_up(self) -> None:
        """Make the process load the tokenizer. Raises the error that it reports."""
        if self._control is None or not self._has_process:
            await self.spawn()
        assert self._control is not None
        self._control.send(self._setup)
        loaded = await self._control.receive()
        if loaded is None:
            raise Disconnected
        if self.tokenizer.has_text:  # already loaded
            loaded.decoder = ""
        self.loaded = loaded
        self._setup.template_facts = loaded.template_facts
        self._is_set_up = True
        for slot, channel in enumerate(self._workers):
            self._queue.add(TextWorkerChannel(slot, channel))

    async def _request(self, request: TextRequest, frame: bytes, size: int) -> TextReply:
        is_alone, is_long = request.grammar is not None, _is_long(request, size)
        process, client = self._process, client_of_request.get()
        channel = await self._queue.take(client, is_long, is_alone)
        seconds = 2 * MAX_SECONDS + MAX_SECONDS_PER_CHAR * max(size, self._setup.max_chars if request.messages else 0)
        media = self._setup.media
        seconds += 0.0 if media is None else request.media_seconds(media.kind)
        seconds += MAX_MEDIA_SECONDS["audio"] * (request.audio is not None)
        exchange = asyncio.ensure_future(self._exchange(channel, request.number, frame))

        def on_done(exchange: asyncio.Future[TextReply]) -> None:
            failed = exchange.cancelled() or exchange.exception() is not None
            gone = failed or self._process is not process
            self._queue.put(None if gone else channel, is_long, client if is_alone else None)

        exchange.add_done_callback(on_done)
        try:
            await self._wait(exchange, seconds + _EXTRA_SECONDS)
            if not exchange.done():  # its worker is replaced; if that fails too, the whole process is
                if self._control is not None:
                    self._control.send(Drop(channel.slot, request.number, is_late=True))
                await asyncio.wait({exchange}, timeout=_REPLACE_SECONDS)
                if not exchange.done():
                    raise TimeoutError
            return exchange.result()
        except asyncio.CancelledError:
            self._dropping.add(dropping := asyncio.ensure_future(self._drop(channel, request.number, exchange)))
            dropping.add_done_callback(self._dropping.discard)
            raise
        except (TimeoutError, ConnectionError, InvalidMessage) as failure:
            if process is not None and self._process is process:  # else another request has already detected it
                await self._replace(process, failure)
            raise

    async def _wait(self, exchange: asyncio.Future[TextReply], seconds: float) -> None:
        """Wait for a reply. Raises ``TimeoutError`` if the process, which replaces workers, is stopped meanwhile."""
        process, deadline = self._process, time.monotonic() + seconds
        while not exchange.done() and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait({exchange}, timeout=min(left, _STOPPED_SECONDS))
            if not exchange.done() and left > _STOPPED_SECONDS and process is not None and is_stopped(process.pid):
                raise TimeoutError

    async def _drop(self, channel: TextWorkerChannel, number: int, exchange: asyncio.Future[TextReply]) -> None:
        """Send ``Drop`` for a worker's request until a reply arrives, because the worker may not have started on it."""
        control = self._control
        while not exchange.done() and control is not None:
            control.send(Drop(channel.slot, number))
            await asyncio.wait({exchange}, timeout=_DROP_SECONDS)

    async def _exchange(self, worker: TextWorkerChannel, number: int, frame: bytes) -> TextReply:
        """Send a request and wait for its reply. Must not be cancelled."""
        worker.channel.send_bytes(frame)
        while (reply := await worker.channel.receive()) is not None:
            if reply.number == number:  # else it is the reply for a worker that died while idle
                return reply
        raise Disconnected


def _is_long(request: TextRequest, size: int) -> bool:
    """Whether a request may take long: a grammar and media may take seconds, however short they are."""
    return size > LONG_CHARS or request.grammar is not None or bool(request.media) or request.audio is not None
