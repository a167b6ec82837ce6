"""The HTTP process's side of chat templates: conversations are rendered to text by worker processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from aiakq.arguments.server import API_KEY_VARIABLE
from aiakq.errors import error
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.process.template_process import LENGTH, MAX_SECONDS, RenderReply, RenderRequest, Setup

_COMMAND = ("-P", "-c", "from aiakq.server.process.template_process import main; main()")
#: Conversations rendered at a time, so that a slow one does not delay the others.
NUM_WORKERS = 4
#: Seconds to wait for a reply beyond a worker's own limit, before all workers are restarted.
_EXTRA_SECONDS = 30.0
_Channel = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TemplateClient:
    """Renders conversations with the model's chat template. ``available`` tells whether there is one."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, max_chars: int) -> None:
        self.available = template is not None or tokenizer.has_chat_template
        self._tokenizer = tokenizer
        self._template = template
        self._max_chars = max_chars
        self._idle: asyncio.Queue[_Channel] = asyncio.Queue()
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def render(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        """The prompt text of a conversation. Raises ``no_chat_template`` or ``chat_template``."""
        if not self.available:
            raise error("no_chat_template")
        await self.start()
        channel = await self._idle.get()
        try:
            reply = await asyncio.shield(asyncio.ensure_future(self._request(channel, messages, arguments)))
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, msgspec.MsgspecError):
            await self.stop()
            raise error("chat_template", reason="its process ended") from None
        if reply.failure:
            raise error("chat_template", reason=reply.failure)
        return reply.text

    async def start(self) -> None:
        """Start the process, unless it is running."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            hf = self._tokenizer.hf
            template = self._template or ""
            try:
                if hasattr(hf, "get_chat_template"):  # the tokenizer of an extension may lack it
                    template = hf.get_chat_template(self._template)
            except ValueError as failure:  # several templates, none of them the default
                raise error("chat_template", reason=str(failure).rstrip(".")[:200]) from None
            self._close_idle()
            pairs = [socket.socketpair() for _ in range(NUM_WORKERS)]
            numbers = [theirs.fileno() for _, theirs in pairs]
            environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *_COMMAND,
                    *map(str, numbers),
                    pass_fds=numbers,
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2,
                    process_group=0,
                )
            finally:
                for _, theirs in pairs:
                    theirs.close()
            channels = [await asyncio.open_unix_connection(sock=ours) for ours, _ in pairs]
            _write(channels[0], Setup(template, dict(getattr(hf, "special_tokens_map", {})), self._max_chars))
            for channel in channels:
                self._idle.put_nowait(channel)

    async def stop(self) -> None:
        """End the process and its workers."""
        process, self._process = self._process, None
        self._close_idle()
        if process is not None and process.returncode is None:
            os.killpg(process.pid, 9)
            await process.wait()

    def _close_idle(self) -> None:
        """Close the channels of idle workers, which then end."""
        while not self._idle.empty():
            self._idle.get_nowait()[1].close()

    async def _request(
        self, channel: _Channel, messages: list[dict[str, Any]], arguments: Mapping[str, Any]
    ) -> RenderReply:
        """Render one conversation over ``channel``, which is idle again afterwards. Must not be cancelled."""
        reader, _ = channel
        number = next(self._numbers)
        _write(channel, RenderRequest(number, messages, dict(arguments)))
        async with asyncio.timeout(MAX_SECONDS + _EXTRA_SECONDS):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                reply = msgspec.msgpack.decode(await reader.readexactly(length), type=RenderReply)
                if reply.number == number:  # else it is the reply for a worker that died between two requests
                    break
        self._idle.put_nowait(channel)
        return reply


def _write(channel: _Channel, record: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(record)
    channel[1].write(LENGTH.pack(len(body)) + body)
