"""``aiakq bench serve`` and ``bench sweep``: measure a running server, or one that is started for the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from aiakq.errors import error
from aiakq.terminal import console, tables
from aiakq.terminal.bench_commands import bench, measure
from aiakq.terminal.benchmarked_server import address, running_server
from aiakq.terminal.help import Command
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.bench import RepeatArguments, ServeArguments, SweepArguments
    from aiakq.arguments.common import ResultArguments
    from aiakq.bench.serve import ServeOptions
    from aiakq.records import Record


@bench.command(cls=Command)
@with_arguments("bench serve")
def serve(
    arguments: ServeArguments, repeating: RepeatArguments, result: ResultArguments, engine: dict[str, object]
) -> None:
    """Measure a server under load, as its clients see it.

    With MODEL, a server is started with the given engine options and stopped at the end. Otherwise --base-url, or
    --host and --port, are the address of a running one.
    """
    from aiakq.bench import repeats, served_drafts
    from aiakq.bench import serve as measuring

    options = measuring.ServeOptions(**vars(arguments) | {"base_url": address(arguments, engine)})
    measuring.check(options)
    count, rounds = repeating.repeats, repeating.compare_rounds
    if repeating.compare_speculation and count > 1:
        reason, hint = "both repeat the load", "Give --compare-rounds."
        raise error("option_conflict", option="--compare-speculation", other="--repeats", reason=reason, hint=hint)

    def compare() -> Record:
        with console.ProgressBars("bench serve") as bars, running_server(options, engine, bars) as (running, facts):
            return served_drafts.run(running, rounds, lambda stage: _progress(bars, stage), facts)

    def once(number: int) -> Record:
        seed = None if options.seed is None else options.seed + number
        stage = "requests" if count == 1 else f"run {number + 1} of {count}"
        with console.ProgressBars("bench serve") as bars, running_server(options, engine, bars) as (running, facts):
            return measuring.run(replace(running, seed=seed), _progress(bars, stage), facts)

    def run() -> Record:
        if repeating.compare_speculation:
            return compare()
        return once(0) if count == 1 else repeats.join([once(number) for number in range(count)])

    template = measuring.template() if count == 1 else repeats.template(measuring.template())
    if repeating.compare_speculation:
        template = served_drafts.template(rounds)
    unmeasured = measuring.unmeasured(options)
    measure(template, result, lambda: _with_report(options, run), unmeasured=unmeasured)


def _progress(bars: console.ProgressBars, stage: str) -> Callable[[int, int, int], None]:
    """Return a progress callback of a load, for the bar ``stage``."""

    def update(done: int, total: int, failed: int) -> None:
        bars.update(stage, done, total, f"{failed} failed" if failed else "")

    return update


@bench.command(cls=Command)
@with_arguments("bench sweep")
def sweep(
    arguments: ServeArguments, sweep_arguments: SweepArguments, result: ResultArguments, engine: dict[str, object]
) -> None:
    """Measure a server at increasing load: one request at a time, --levels rates, and saturation.

    With --search goodput it finds the highest rate that meets the limits. Each level takes --duration seconds, 10 if
    not given. The server is selected as for bench serve.
    """
    from aiakq.bench import serve as measuring
    from aiakq.bench import sweep as sweeping

    options = measuring.ServeOptions(**vars(arguments) | {"base_url": address(arguments, engine)})

    def run() -> Record:
        with console.ProgressBars("bench sweep") as bars, running_server(options, engine, bars) as (running, _):
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
