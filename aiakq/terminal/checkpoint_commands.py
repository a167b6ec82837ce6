"""``aiakq eval``, ``aiakq inspect`` and ``aiakq collect-env``: each makes one call and prints a table or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from aiakq.terminal import console, quality_tables, tables
from aiakq.terminal.bench_commands import measure
from aiakq.terminal.compare_models_command import compare as compare
from aiakq.terminal.convert_command import convert as convert
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.checkpoint import EvalArguments, InspectArguments
    from aiakq.arguments.common import JsonArguments, ResultArguments
    from aiakq.records import Record


@with_arguments("eval")
def evaluate(arguments: EvalArguments, output: JsonArguments, result: ResultArguments) -> None:
    """Measure how close a quantized model is to its original: KL divergence, top-1 agreement, perplexity, tasks."""
    from aiakq.arguments.server import checked
    from aiakq.evaluation import evaluate as quality
    from aiakq.formats.hub import check_model_name

    for model in filter(None, (arguments.model, arguments.original, *arguments.versus)):
        check_model_name(model)
    quality.check(arguments)
    # The engine's arguments define the valid dtypes and devices.
    checked({name: getattr(arguments, name) for name in ("model", "dtype", "device")}, server=False)

    def run() -> Record:
        with console.ProgressBars("eval") as bars:
            return quality.run(arguments, bars.update)

    unmeasured = quality.unmeasured(arguments)
    show = quality_tables.quality_result
    emit, parts = output.json, quality.by_text
    measure(quality.template(), result, run, show, emit=emit, unmeasured=unmeasured, parts=parts)


@with_arguments("inspect")
def inspect(arguments: InspectArguments, output: JsonArguments) -> None:
    """Describe a checkpoint layer by layer, and which kernels would run it. Reads headers only."""
    from aiakq.arguments.server import checked
    from aiakq.formats.hub import check_model_name

    check_model_name(arguments.model)
    from aiakq.runtime.inspect.inspection import collapse, inspect_checkpoint

    checked({name: getattr(arguments, name) for name in ("model", "dtype", "device")}, server=False)
    if arguments.fit is not None or arguments.fit_context is not None:
        from aiakq.terminal.fit_table import show_fit

        show_fit(arguments, output.json)
        return
    inspection = inspect_checkpoint(arguments.model, arguments.revision, arguments.device, arguments.dtype)
    with console.results_on_stdout(not output.json):
        tables.inspection(inspection, inspection.layers if arguments.all else collapse(inspection.layers))
    if output.json:
        console.emit(inspection.document())


def collect_env(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Print versions, machine and settings for a bug report, without secrets."""
    # Reads no configuration file, because that may be what is broken.
    from aiakq.collect_env import collect, text

    document = collect()
    if json:
        console.emit(document)
    else:
        console.write(text(document))
