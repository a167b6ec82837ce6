"""``aiakq bench``: runs a benchmark, prints a table and a JSON document, checks gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from aiakq.errors import error
from aiakq.terminal import console, tables
from aiakq.terminal.help import Command, Group
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.bench import KernelArguments, LatencyArguments, ServeArguments, ThroughputArguments
    from aiakq.arguments.common import ResultArguments
    from aiakq.bench.serve import ServeOptions
    from aiakq.records import Record

bench = typer.Typer(name="bench", cls=Group, help="Measure: a table on stderr, one JSON document on stdout.")


def measure(
    template: dict[str, Any],
    result: ResultArguments,
    run: Callable[[], Record],
    show: Callable[[dict[str, Any]], None] = tables.bench_result,
    emit: bool = True,
) -> None:
    """Check gates and output before the run, run, show and write the result, then hold it against the gates.

    template  a document with every key the result will have.
    emit      whether the document goes to stdout.

    Raises ``bad_gate``, ``output_failed``, ``bench_failed`` when a request failed, ``gate_failed``.
    """
    from aiakq.bench import gates
    from aiakq.records import write_json

    conditions = gates.parse(result.fail_if)
    gates.check_keys(conditions, template)
    if result.output is not None and not result.output.parent.is_dir():
        raise error("output_failed", path=result.output, reason="its folder does not exist")
    record = run()
    document = record.document()
    show(document)
    if result.output is not None:
        write_json(document, result.output)
    if emit:
        console.emit(document)
    if document.get("failed"):
        total = document["completed"] + document["failed"]
        raise error("bench_failed", failed=document["failed"], total=total, reason=document["first_error"])
    outcomes = gates.evaluate(conditions, document)
    tables.gate_outcomes(outcomes)
    if (problem := gates.failure(outcomes)) is not None:
        raise problem


def _check_engine(engine: dict[str, Any], command: str) -> None:
    """Refuse wrong engine arguments before anything heavy is imported."""
    from aiakq.arguments.server import checked

    if not checked(engine, server=False)["model"]:
        raise error("usage", reason="No model is given.", hint=f"Example: aiakq bench {command} MODEL")


@bench.command(cls=Command)
@with_arguments("bench latency")
def latency(arguments: LatencyArguments, result: ResultArguments, engine: dict[str, Any]) -> None:
    """Time one batch of equal requests, in this process."""
    _check_engine(engine, "latency")
    from aiakq.bench import latency as measuring

    options = measuring.LatencyOptions(engine, **vars(arguments))

    def run() -> Record:
        with console.ProgressBars("bench latency") as bars:
            return measuring.run(options, bars.update)

    measure(measuring.template(), result, run)


@bench.command(cls=Command)
@with_arguments("bench throughput")
def throughput(arguments: ThroughputArguments, result: ResultArguments, engine: dict[str, Any]) -> None:
    """Time many requests that are all there from the start, in this process."""
    _check_engine(engine, "throughput")
    from aiakq.bench import throughput as measuring

    options = measuring.ThroughputOptions(engine, **vars(arguments))

    def run() -> Record:
        with console.ProgressBars("bench throughput") as bars:
            return measuring.run(options, bars.update)

    measure(measuring.template(), result, run)


@bench.command(cls=Command)
@with_arguments("bench serve")
def serve(arguments: ServeArguments, result: ResultArguments, engine: dict[str, Any]) -> None:
    """Put load on a server and time its answers as clients see them.

    With MODEL a server is started for it, with the engine options given, and stopped at the end; without, --base-url
    or --host and --port say where one runs.
    """
    from aiakq.bench import serve as measuring

    options = measuring.ServeOptions(**vars(arguments) | {"base_url": _running_server(arguments, engine)})
    measure(measuring.template(), result, lambda: _measure_server(options, engine))


def _measure_server(options: ServeOptions, engine: dict[str, Any]) -> Record:
    """Measure the running server, or one that is started with ``engine``."""
    from aiakq.bench import serve as measuring

    with console.ProgressBars("bench serve") as bars:

        def progress(done: int, total: int, failed: int) -> None:
            bars.update("requests", done, total, f"{failed} failed" if failed else "")

        if "model" not in engine:
            return measuring.run(options, progress)
        from aiakq.server.background import start_in_background

        bars.update("start", 0, 1)
        with start_in_background(engine | _NO_ADMISSION_LIMITS) as started:
            assert started.ready is not None
            return measuring.run(replace(options, base_url=started.url), progress, started.ready.facts)


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
    from aiakq.arguments.server import checked

    if "model" in engine:
        if arguments.base_url is not None:
            raise error(
                "option_conflict",
                option=f"The model {engine['model']!r}",
                other="--base-url",
                reason="it would start a server beside the running one",
                hint="Give one. The name of a model on a running server is --model.",
            )
        checked(engine, server=False)
        return ""
    if engine:
        raise error(
            "usage",
            reason=f"--{next(iter(engine)).replace('_', '-')} is for a server that is started here.",
            hint="Name its model: aiakq bench serve MODEL",
        )
    host = arguments.host
    return arguments.base_url or f"http://{f'[{host}]' if ':' in host else host}:{arguments.port}"


@bench.command(cls=Command)
@with_arguments("bench kernels")
def kernels(arguments: KernelArguments, result: ResultArguments) -> None:
    """Time each kernel on this device, beside what its memory and its units would allow."""
    from aiakq.arguments.server import checked
    from aiakq.bench import kernels as measuring

    engine = {name: getattr(arguments, name) for name in ("dtype", "device", "kv_cache_dtype")}
    checked(engine, server=False)
    measuring.check(arguments)

    def run() -> Record:
        with console.ProgressBars("bench kernels") as bars:
            return measuring.run(arguments, bars.update)

    measure(measuring.template(), result, run, tables.kernels_result)
