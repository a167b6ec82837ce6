"""Options of ``aiakq chat``. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from aiakq.arguments.argument import argument


def parse_params(entries: Sequence[str]) -> dict[str, object]:
    """Parse ``temperature=0 stop=["."]`` into request fields; other values than JSON are strings. Raises ValueError."""
    params: dict[str, object] = {}
    for entry in entries:
        name, equals, text = entry.strip().partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(entry)
        try:
            params[name] = json.loads(text)
        except ValueError:
            params[name] = text
    return params


def _checked_params(entries: Sequence[str]) -> Sequence[str]:
    parse_params(entries)
    return entries


@dataclass(frozen=True, kw_only=True)
class ChatArguments:
    """Options of ``aiakq chat``."""

    base_url: str | None = argument(
        None,
        "Address of a running server with an OpenAI-compatible API; http://127.0.0.1:8000 if neither this nor MODEL is "
        "given.",
        flags=("--base-url", "--url"),
        metavar="URL",
    )
    model: str | None = argument(
        None, "Name of the model on the server; the first one listed if not given.", metavar="NAME"
    )
    compare: str | None = argument(
        None,
        "Show answers of a second model side by side: a folder or hub name, or the address of a server.",
        metavar="MODEL|URL",
    )
    api_key: str | None = argument(None, "API key; prefer the environment variable AIAKQ_API_KEY.", metavar="KEY")
    system: str | None = argument(None, "System prompt.")
    prompt: str | None = argument(
        None, "Answer this prompt and exit; without a terminal it is read from standard input if not given."
    )
    image: tuple[str, ...] = argument(
        (),
        "Image of the first message, for a model that reads images: a file, or a URL that the server reads; may be "
        "given several times.",
        separator="\n",
        metavar="FILE|URL",
    )
    params: tuple[str, ...] = argument(
        (),
        "Sampling parameter of the requests, like temperature=0.",
        flags=("--params", "-p"),
        separator=";",
        metavar="NAME=VALUE",
        convert=_checked_params,
        expected="NAME=VALUE, like temperature=0",
        hint="Example: --params temperature=0 --params max_tokens=100",
    )
