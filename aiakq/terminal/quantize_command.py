"""``aiakq quantize``: runs the quantization and prints a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.terminal import console, tables
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.common import JsonArguments
    from aiakq.arguments.quantize import QuantizeArguments


@with_arguments("quantize")
def quantize(arguments: QuantizeArguments, output: JsonArguments) -> None:
    """Quantize a model: -i MODEL -o DIR -quant_type METHOD."""
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.paths import check_paths

    check_paths(arguments)
    options = QuantizeOptions(**vars(arguments))
    # A slow import, deferred until the options are validated.
    from aiakq.quantizers.pipeline import quantize_checkpoint

    with console.ProgressBars("quantize") as bars:
        report = quantize_checkpoint(options, lambda p: bars.update(p.stage, p.done, p.total, p.detail))
    with console.results_on_stdout(not output.json):
        tables.quantize_report(report)
    if output.json:
        console.emit({"schema_version": 1, "kind": "quantize", **report.document()})
