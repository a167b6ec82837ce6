"""The server that ``bench serve`` and ``bench sweep`` measure: a running one, or one that is started for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from aiakq.terminal import console
from aiakq.terminal.usage_errors import check_one_server, server_url

if TYPE_CHECKING:
    from aiakq.arguments.bench import ServeArguments
    from aiakq.bench.serve import ServeOptions

#: Options of a server that is started here: admin routes, for --compare-speculation, and no admission limits, because a
#: benchmark must not measure rejected requests.
_OWN_SERVER = {
    "enable_admin_routes": True,
    "max_connections": 1 << 16,
    "max_connections_per_address": 1 << 16,
    "max_num_queued_reqs": 1 << 30,
    "max_num_queued_tokens": 1 << 40,
    "max_queue_seconds": 1e6,
    "max_request_seconds": 1e6,
}


def address(arguments: ServeArguments, engine: dict[str, object]) -> str:
    """Return the URL of the server to measure, or "" to start one. Raises ``option_conflict`` and ``usage``."""
    check_one_server(
        engine,
        "--base-url" if arguments.base_url is not None else None,
        hint="Give one. The name of a model on a running server is --model.",
        started="server that is started",
        example="Name its model: aiakq bench serve MODEL",
    )
    if "model" in engine:
        return ""
    host = arguments.host
    if arguments.base_url is not None:
        return server_url("--base-url", arguments.base_url)
    return f"http://{f'[{host}]' if ':' in host else host}:{arguments.port}"


@contextlib.contextmanager
def running_server(
    options: ServeOptions, engine: dict[str, object], bars: console.ProgressBars
) -> Iterator[tuple[ServeOptions, Mapping[str, str] | None]]:
    """Yield the options with the server's address, and the facts reported by a server that is started here."""
    if "model" not in engine:
        yield options, None
        return
    from aiakq.server.background import start_in_background

    bars.update("start", 0, 1)
    with start_in_background(engine | _OWN_SERVER) as started:
        assert started.ready is not None
        yield replace(options, base_url=started.url), started.ready.facts
