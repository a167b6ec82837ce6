"""``aiakq bench compare``, ``ab`` and ``counters``: comparisons with a table, a JSON document and an exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from aiakq.terminal import console, tables
from aiakq.terminal.bench_commands import bench, check_engine
from aiakq.terminal.help import Command
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.comparison import AlternationArguments, CompareArguments, CounterArguments, ReportArguments
    from aiakq.bench.comparison.compare import ComparisonDocument


@bench.command(cls=Command)
@with_arguments("bench compare")
def compare(arguments: CompareArguments, reports: ReportArguments) -> None:
    """Compare two results metric by metric, with confidence intervals and verdicts.

    Exits with 10 if a gated metric is worse by more than --margin, with 11 if one is undecided.
    """
    from aiakq.bench.comparison import compare as comparing
    from aiakq.bench.comparison.reports import check

    check(reports)
    _finish(comparing.run(arguments), reports, arguments.allow_undecided)


@bench.command(cls=Command)
@with_arguments("bench ab")
def ab(arguments: AlternationArguments, reports: ReportArguments, engine: dict[str, object]) -> None:
    """Measure two sides alternately on this machine, until a verdict is possible.

    A side is a checkout, git revision, wheel, interpreter, model or setting. Exits with 10 if a gated metric is worse
    by more than --margin, with 11 if one is undecided.
    """
    from aiakq.arguments.server import checked
    from aiakq.bench.comparison import alternation
    from aiakq.bench.comparison.reports import check

    checked(engine, server=False)
    check(reports)
    with console.ProgressBars("bench ab") as bars:

        def progress(done: int, total: int, estimates: str) -> None:
            bars.update("rounds", done, total, estimates)

        record = alternation.run(arguments, engine, progress)
    _finish(cast("ComparisonDocument", record.document()), reports, arguments.allow_undecided)


@bench.command(cls=Command)
@with_arguments("bench counters")
def counters(arguments: CounterArguments, reports: ReportArguments, engine: dict[str, object]) -> None:
    """Count the work of the engine for a fixed load on a CPU: steps, tokens, pages, operations, bytes.

    With --against FILE it exits with 10 if a counter differs from that file, which --output writes.
    """
    check_engine(engine, "counters")
    from aiakq.bench import counters as counting
    from aiakq.bench.comparison.reports import check
    from aiakq.records import write_json

    check(reports)
    with console.ProgressBars("bench counters") as bars:
        record = counting.run(arguments, engine, lambda done, total, phase: bars.update("phases", done, total, phase))
    document = record.document()
    if reports.output is not None:
        write_json(counting.baseline(document), reports.output)
    if arguments.against is None:
        _show(document, tables.counters_result)
    else:
        _finish(counting.compare(document, arguments.against), replace(reports, output=None), allow_undecided=False)


def _show(document: Mapping[str, object], table: Callable[[Mapping[str, object]], None]) -> None:
    """Print a table on a terminal; otherwise the JSON document on stdout and the table on stderr."""
    is_terminal = console.stdout_is_terminal()
    with console.results_on_stdout(is_terminal):
        table(document)
    if not is_terminal:
        console.emit(document)


def _finish(document: ComparisonDocument, reports: ReportArguments, allow_undecided: bool) -> None:
    """Show and write a comparison, and raise its failure: ``got_worse``, ``counters_changed`` or ``undecided``."""
    from aiakq.bench.comparison.compare import failure
    from aiakq.bench.comparison.reports import write
    from aiakq.records import write_json

    _show(document, tables.comparison)
    if reports.output is not None:
        write_json(document, reports.output)
    write(document, reports)
    if (problem := failure(document, allow_undecided)) is not None:
        raise problem
