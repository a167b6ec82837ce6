"""``aiakq quantize``: runs the quantization, or says what it would do, and prints a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.terminal import console, tables
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.common import JsonArguments
    from aiakq.arguments.quantize import DryRunArguments, QuantizeArguments
    from aiakq.quantizers.options import QuantizeOptions


@with_arguments("quantize")
def quantize(arguments: QuantizeArguments, only: DryRunArguments, output: JsonArguments) -> None:
    """Quantize a model: -i MODEL -o DIR -quant_type METHOD."""
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.paths import check_paths

    check_paths(arguments)
    options = QuantizeOptions(**vars(arguments))
    if only.dry_run:
        _dry_run(options, output.json)
        return
    # A slow import, deferred until the options are validated.
    from aiakq.quantizers.pipeline import quantize_checkpoint

    with console.ProgressBars("quantize") as bars:
        report = quantize_checkpoint(options, lambda p: bars.update(p.stage, p.done, p.total, p.detail))
    with console.results_on_stdout(not output.json):
        tables.quantize_report(report)
    if output.json:
        console.emit({"schema_version": 1, "kind": "quantize", **report.document()})


def _dry_run(options: QuantizeOptions, as_json: bool) -> None:
    import aiakq.quantizers.pipeline  # noqa: F401  # a part of the memory of a run
    from aiakq.quantizers.dry_run import dry_run
    from aiakq.terminal.dry_run_table import dry_run_table

    with console.waiting("reading headers"):
        result = dry_run(options)
    with console.results_on_stdout(not as_json):
        dry_run_table(result)
    if as_json:
        console.emit({"schema_version": 1, "kind": "quantize dry run", **result.document()})
