"""``aiakq bench latency``, ``throughput`` and ``kernels``, and the output and gates common to all benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import typer

from aiakq.errors import error
from aiakq.terminal import console, tables
from aiakq.terminal.help import Command, Group
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.bench import (
        KernelArguments,
        LatencyArguments,
        ThroughputArguments,
    )
    from aiakq.arguments.common import ResultArguments
    from aiakq.bench.gates import Parts
    from aiakq.records import Record

bench = typer.Typer(
    name="bench", cls=Group, help="Measure: a table on a terminal; otherwise JSON on stdout and the table on stderr."
)


def measure(
    template: dict[str, object],
    result: ResultArguments,
    run: Callable[[], Record],
    show: Callable[[dict[str, object]], None] = tables.bench_result,
    emit: bool | None = None,
    unmeasured: Mapping[str, str] | None = None,
    parts: Parts | None = None,
) -> None:
    """Validate gates and output paths, run a benchmark, show and write its result, and evaluate its gates.

    template    a document with every key that the result will have.
    show        prints the table of the result.
    emit        whether to write the document to stdout instead of the table; None: unless it is a terminal.
    unmeasured  keys of the template that this run does not measure -> reason.
    parts       returns the numbers of each part of the result, to which gates apply.

    Raises ``bad_gate``, ``output_failed``, ``bench_failed`` if a request failed, ``gate_failed``,
    ``result_has_warnings`` and ``other_machine``.
    """
    from aiakq.bench import gates
    from aiakq.records import write_json

    conditions = gates.parse(result.fail_if)
    gates.check_keys(conditions, template)
    gates.check_measurable(conditions, unmeasured or {})
    baseline = gates.read_baseline(conditions, result.baseline)
    if result.output is not None and not result.output.parent.is_dir():
        raise error("output_failed", path=result.output, reason="its folder does not exist")
    document = run().document()
    outcomes = gates.evaluate_parts(conditions, document, baseline, parts or (lambda _: {}))
    document["gates"] = [outcome.document() for outcome in outcomes]
    emit = not console.stdout_is_terminal() if emit is None else emit
    with console.results_on_stdout(not emit):
        show(document)
    if result.output is not None:
        write_json(document, result.output)
    if emit:
        console.emit(document)
    if document.get("failed"):
        total = document["completed"] + document["failed"]
        raise error("bench_failed", failed=document["failed"], total=total, reason=document["first_error"])
    if baseline:
        gates.check_machines(baseline, document)
    with console.results_on_stdout(not emit):
        tables.gate_outcomes(outcomes)
    if (problem := gates.failure(outcomes)) is not None:
        raise problem
    if result.strict and document["warnings"]:
        raise error("result_has_warnings", count=len(document["warnings"]), first=document["warnings"][0].rstrip("."))


def check_engine(engine: dict[str, object], command: str) -> None:
    """Validate the engine arguments before any slow import. Raises ``usage`` and the errors of ``checked``."""
    from aiakq.arguments.server import checked
    from aiakq.formats.hub import check_model_name

    model = checked(engine, server=False).model
    if not model:
        raise error("usage", reason="No model is given.", hint=f"Example: aiakq bench {command} MODEL")
    check_model_name(model)


@bench.command(cls=Command)
@with_arguments("bench latency")
def latency(arguments: LatencyArguments, result: ResultArguments, engine: dict[str, object]) -> None:
    """Measure the latency of a batch of equal requests, in this process."""
    check_engine(engine, "latency")
    from aiakq.bench import latency as measuring

    options = measuring.LatencyOptions(engine, **vars(arguments))

    def run() -> Record:
        with console.ProgressBars("bench latency") as bars:
            return measuring.run(options, bars.update)

    measure(measuring.template(), result, run, unmeasured=measuring.unmeasured(arguments))


@bench.command(cls=Command)
@with_arguments("bench throughput")
def throughput(arguments: ThroughputArguments, result: ResultArguments, engine: dict[str, object]) -> None:
    """Measure the throughput of many requests submitted at once, in this process."""
    check_engine(engine, "throughput")
    from aiakq.bench import throughput as measuring

    options = measuring.ThroughputOptions(engine, **vars(arguments))

    def run() -> Record:
        with console.ProgressBars("bench throughput") as bars:
            return measuring.run(options, bars.update)

    measure(measuring.template(), result, run)


@bench.command(cls=Command)
@with_arguments("bench kernels")
def kernels(arguments: KernelArguments, result: ResultArguments) -> None:
    """Measure each kernel on this device against its roofline."""
    from aiakq.arguments.server import checked
    from aiakq.bench import kernels as measuring

    engine = {name: getattr(arguments, name) for name in ("dtype", "device", "kv_cache_dtype")}
    checked(engine, server=False)
    measuring.check(arguments)

    def run() -> Record:
        with console.ProgressBars("bench kernels") as bars:
            return measuring.run(arguments, bars.update)

    measure(measuring.template(), result, run, tables.kernels_result)
