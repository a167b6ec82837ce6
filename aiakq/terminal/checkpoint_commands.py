"""``aiakq eval`` and ``aiakq collect-env``: each makes one call and prints a table or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from aiakq.terminal import console, quality_tables
from aiakq.terminal.bench_commands import measure
from aiakq.terminal.compare_models_command import compare as compare
from aiakq.terminal.convert_command import convert as convert
from aiakq.terminal.inspect_command import inspect as inspect
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.checkpoint import EvalArguments
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
    checked({name: getattr(arguments, name) for name in ("model", "dtype", "device", "kv_cache_dtype")}, server=False)

    def run() -> Record:
        with console.ProgressBars("eval") as bars:
            return quality.run(arguments, bars.update)

    unmeasured = quality.unmeasured(arguments)
    show = quality_tables.quality_result
    emit, parts = output.json, quality.by_text
    measure(quality.template(), result, run, show, emit=emit, unmeasured=unmeasured, parts=parts)


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
