"""``aiakq bench serve`` and ``bench sweep``: load on a server that runs, or on one that is started for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiakq.errors import error
from aiakq.terminal import console, tables
from aiakq.terminal.bench_commands import bench, measure
from aiakq.terminal.help import Command
from aiakq.terminal.options import with_arguments
from aiakq.terminal.usage_errors import check_one_server, server_url

if TYPE_CHECKING:
    from aiakq.arguments.bench import RepeatArguments, ServeArguments, SweepArguments
    from aiakq.arguments.common import ResultArguments
    from aiakq.bench.serve import ServeOptions
    from aiakq.records import Record


@bench.command(cls=Command)
@with_arguments("bench serve")
def serve(
    arguments: ServeArguments, repeating: RepeatArguments, result: ResultArguments, engine: dict[str, Any]
) -> None:
    """Put load on a server and time its answers as clients see them.

    With MODEL a server is started for it, with the engine options given, and stopped at the end; without, --base-url
    or --host and --port say where one runs.
    """
    from aiakq.bench import repeats
    from aiakq.bench import serve as measuring

    options = measuring.ServeOptions(**vars(arguments) | {"base_url": _running_server(arguments, engine)})
    measuring.check(options)
    count = repeating.repeats

    def once(number: int) -> Record:
        seed = None if options.seed is None else options.seed + number
        stage = "requests" if count == 1 else f"run {number + 1} of {count}"
        with console.ProgressBars("bench serve") as bars, _server(options, engine, bars) as (running, facts):

            def progress(done: int, total: int, failed: int) -> None:
                bars.update(stage, done, total, f"{failed} failed" if failed else "")

            return measuring.run(replace(running, seed=seed), progress, facts)

    def run() -> Record:
        return once(0) if count == 1 else repeats.join([once(number) for number in range(count)])

    template = measuring.template() if count == 1 else repeats.template(measuring.template())
    unmeasured = measuring.unmeasured(options)
    measure(template, result, lambda: _with_report(options, run), unmeasured=unmeasured)


@bench.command(cls=Command)
@with_arguments("bench sweep")
def sweep(
    arguments: ServeArguments, sweep_arguments: SweepArguments, result: ResultArguments, engine: dict[str, Any]
) -> None:
    """Put rising load on a server: from one request at a time to saturation, at --levels rates between.

    With --search goodput it finds the highest rate that keeps the limits. Each level takes --duration seconds, 10 if
    not given. The server is that of bench serve.
    """
    from aiakq.bench import serve as measuring
    from aiakq.bench import sweep as sweeping

    options = measuring.ServeOptions(**vars(arguments) | {"base_url": _running_server(arguments, engine)})

    def run() -> Record:
        with console.ProgressBars("bench sweep") as bars, _server(options, engine, bars) as (running, _):
            return sweeping.run(running, sweep_arguments, lambda *known: bars.update("levels", *known))

    unmeasured = (
        {} if measuring.limits_of(options) else {"max_goodput_rate": "no limits are given (--goodput or --preset)"}
    )
    measure(
        sweeping.template(),
        result,
        lambda: _with_report(options, run),
        tables.sweep_result,
        unmeasured=unmeasured,
    )


@contextlib.contextmanager
def _server(
    options: ServeOptions, engine: dict[str, Any], bars: console.ProgressBars
) -> Iterator[tuple[ServeOptions, Mapping[str, str] | None]]:
    """The options for the running server, or for one that is started with ``engine``; and what that one reported."""
    if "model" not in engine:
        yield options, None
        return
    from aiakq.server.background import start_in_background

    bars.update("start", 0, 1)
    with start_in_background(engine | _NO_ADMISSION_LIMITS) as started:
        assert started.ready is not None
        yield replace(options, base_url=started.url), started.ready.facts


def _with_report(options: ServeOptions, run: Callable[[], Record]) -> Record:
    """The record that ``run`` returns, and its report in HTML if one was asked for. Raises ``output_failed``."""
    if options.html is None:
        return run()
    from aiakq.bench.html import page

    try:
        with options.html.open("w", encoding="utf-8") as file:
            record = run()
            file.write(page(record.document()))
    except OSError as problem:
        raise error("output_failed", path=options.html, reason=problem.strerror or problem) from None
    return record


#: A benchmark measures how requests are served, not how they are refused.
_NO_ADMISSION_LIMITS = {
    "max_connections": 1 << 16,
    "max_connections_per_address": 1 << 16,
    "max_num_queued_reqs": 1 << 30,
    "max_num_queued_tokens": 1 << 40,
    "max_queue_seconds": 1e6,
    "max_request_seconds": 1e6,
}


def _running_server(arguments: ServeArguments, engine: dict[str, Any]) -> str:
    """The URL of the server to measure; empty when one is to be started. Raises ``option_conflict``, ``usage``."""
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
