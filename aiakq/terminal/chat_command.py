"""``aiakq chat``: a conversation with a model, or with two side by side."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiakq.errors import error
from aiakq.terminal import console
from aiakq.terminal.options import with_arguments
from aiakq.terminal.usage_errors import check_one_server, server_url

if TYPE_CHECKING:
    from aiakq.arguments.chat import ChatArguments
    from aiakq.arguments.common import JsonArguments
    from aiakq.terminal.chat_client import ChatServer


@with_arguments("chat")
def chat(arguments: ChatArguments, output: JsonArguments, engine: dict[str, object]) -> None:
    """Chat with a model that is loaded here, or with one on a running server.

    With --prompt, --json or without a terminal, a single answer is written to stdout.
    """
    from aiakq.arguments.chat import parse_params

    check_one_server(
        engine,
        "--url" if arguments.base_url is not None else None,
        hint="Give one. The name of a model on a running server is --model, a second model --compare.",
        started="model that is loaded",
        example="Name it: aiakq chat MODEL",
    )
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    once = arguments.prompt is not None or output.json or not terminal
    prompt = arguments.prompt
    if once and prompt is None:
        prompt = sys.stdin.read() if sys.stdin is not None else ""
    if once and not (prompt or "").strip():
        raise error("usage", reason="There is nothing to answer.", hint="Example: echo Hello | aiakq chat MODEL")
    # A slow import, deferred until the options are validated.
    from aiakq.terminal.chat_images import image_url
    from aiakq.terminal.chat_session import ChatSession

    images = [image_url(source, "--image") for source in arguments.image]
    with _servers(arguments, engine) as servers:
        if images:
            for server in servers:
                server.check_reads_images("--image")
        session = ChatSession(servers, arguments.system, parse_params(arguments.params), images=images)
        if not once:
            session.run()
        elif output.json:
            console.emit(session.answer_document(prompt or ""))
        else:
            session.answer_once(prompt or "")


@contextlib.contextmanager
def _servers(arguments: ChatArguments, engine: dict[str, object]) -> Iterator[list[ChatServer]]:
    """Yield the server of the conversation, and that of --compare; servers started here end with the context."""
    from aiakq.terminal.chat_client import ChatServer

    with contextlib.ExitStack() as stack:
        running = server_url("--url", arguments.base_url or "http://127.0.0.1:8000")
        urls = [_started(engine, stack) if "model" in engine else running]
        if arguments.compare is not None:
            if arguments.compare.startswith(("http://", "https://")):
                urls.append(server_url("--compare", arguments.compare))
            else:
                urls.append(_started(engine | {"model": arguments.compare}, stack))
        names = [arguments.model, None]
        servers = []
        for url, name in zip(urls, names, strict=False):
            servers.append(ChatServer(url, arguments.api_key, name))
            stack.callback(servers[-1].close)
        yield servers


def _started(engine: dict[str, object], stack: contextlib.ExitStack) -> str:
    """Start a server for a model, which ends with ``stack``, and return its address."""
    from aiakq.server.background import start_in_background

    with console.waiting(f"loading {engine['model']}"):
        return stack.enter_context(start_in_background(engine)).url
