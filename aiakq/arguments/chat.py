"""Options of ``aiakq chat``. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.arguments.argument import argument


def parse_params(entries: Sequence[str]) -> dict[str, Any]:
    """``temperature=0 stop=["."]`` as fields of a request; a value that is no JSON is a text. Raises ValueError."""
    params: dict[str, Any] = {}
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
    """With whom, and how."""

    base_url: str | None = argument(
        None,
        "A running server, like http://127.0.0.1:8000, which is the default where no MODEL is given. Any with OpenAI's "
        "routes.",
        flags=("--base-url", "--url"),
        metavar="URL",
    )
    model: str | None = argument(
        None, "Name of the model on the server; the first one listed if not given.", metavar="NAME"
    )
    compare: str | None = argument(
        None,
        "Also answer with this one, side by side: a folder or hub name, or the address of a server.",
        metavar="MODEL|URL",
    )
    api_key: str | None = argument(None, "API key; prefer the environment variable AIAKQ_API_KEY.", metavar="KEY")
    system: str | None = argument(None, "System prompt.")
    prompt: str | None = argument(
        None, "Answer this and end; without a terminal it is read from standard input if not given."
    )
    params: tuple[str, ...] = argument(
        (),
        "Sampling fields of the requests, like temperature=0.",
        flags=("--params", "-p"),
        separator=";",
        metavar="NAME=VALUE",
        convert=_checked_params,
        expected="NAME=VALUE, like temperature=0",
        hint="Example: --params temperature=0 --params max_tokens=100",
    )
