"""``aiakq bench serve`` and ``bench sweep``: measure a running server, or one that is started for the benchmark."""

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
    """Measure a server under load, as its clients see it.

    With MODEL, a server is started with the given engine options and stopped at the end. Otherwise --base-url, or
    --host and --port, are the address of a running one.
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
    """Measure a server at increasing load: one request at a time, --levels rates, and saturation.

    With --search goodput it finds the highest rate that meets the limits. Each level takes --duration seconds, 10 if
    not given. The server is selected as for bench serve.
    """
    from aiakq.bench import serve as measuring
    from aiakq.bench import sweep as sweeping

    options = measuring.ServeOptions(**vars(arguments) | {"base_url": _running_server(arguments, engine)})

    def run() -> Record:
        with console.ProgressBars("bench sweep") as bars, _server(options, engine, bars) as (running, _):
            return sweeping.run(running, sweep_arguments, lambda *progress: bars.update("levels", *progress))

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
    """Yield the options with the server's address, and the facts reported by a server that is started here."""
    if "model" not in engine:
        yield options, None
        return
    from aiakq.server.background import start_in_background

    bars.update("start", 0, 1)
    with start_in_background(engine | _NO_ADMISSION_LIMITS) as started:
        assert started.ready is not None
        yield replace(options, base_url=started.url), started.ready.facts


def _with_report(options: ServeOptions, run: Callable[[], Record]) -> Record:
    """Return the record of ``run``, after writing its HTML report if --html is given. Raises ``output_failed``."""
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


#: Disables admission limits: a benchmark must not measure rejected requests.
_NO_ADMISSION_LIMITS = {
    "max_connections": 1 << 16,
    "max_connections_per_address": 1 << 16,
    "max_num_queued_reqs": 1 << 30,
    "max_num_queued_tokens": 1 << 40,
    "max_queue_seconds": 1e6,
    "max_request_seconds": 1e6,
}


def _running_server(arguments: ServeArguments, engine: dict[str, Any]) -> str:
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
