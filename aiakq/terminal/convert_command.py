"""``aiakq convert``: runs the conversion and prints a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.terminal import console
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.common import JsonArguments
    from aiakq.arguments.convert import ConvertArguments
    from aiakq.convert.report import ConversionReport

#: Rows of the table of layers with the largest errors.
_ROWS = 10


@with_arguments("convert")
def convert(arguments: ConvertArguments, output: JsonArguments) -> None:
    """Convert a quantized model to another format, exactly, or any model to GGUF: MODEL DIR --to FORMAT."""
    from aiakq.formats.hub import check_model_name

    check_model_name(arguments.input)
    # A slow import, deferred until the options are validated.
    from aiakq.convert.conversion import convert_checkpoint

    with console.ProgressBars("convert") as bars:
        report = convert_checkpoint(arguments, bars.update)
    with console.results_on_stdout(not output.json):
        _show(report)
    if output.json:
        console.emit({"schema_version": 1, "kind": "convert", **report.document()})


def _show(report: ConversionReport) -> None:
    from aiakq.terminal.quality_tables import wrapped

    worst = report.worst
    number = len(report.layers)
    rows: dict[str, object] = {
        "from": f"{report.source_format}, {report.source_scheme}",
        "to": f"{report.to}, {report.scheme}",
        "layers": f"{number}, every weight the same number" if worst is None else str(number),
        "error of a layer": None if worst is None else f"{report.mean_error:.3%} mean",
        "worst layer": None if worst is None else f"{worst.relative_error:.3%} {worst.name}",
        "size": f"{console.size(report.bytes_before)} before, {console.size(report.bytes_after)} after",
        "time": console.seconds(report.seconds),
        "written to": report.output,
    }
    console.facts("converted", rows)
    changed = sorted(
        (layer for layer in report.layers if layer.relative_error), key=lambda layer: -layer.relative_error
    )
    if changed:
        table = console.table("layer", "was", "is", "error", "largest", "because", left=(0, 1, 2, 5))
        for layer in changed[:_ROWS]:
            error, largest = f"{layer.relative_error:.3%}", console.number(layer.largest_error, 3)
            table.add_row(console.plain(layer.name), layer.before, layer.after, error, largest, layer.change)
        console.show(table)
        if len(changed) > _ROWS:
            where = "--json" if report.to == "gguf" else "aiakq_conversion.json"
            console.result_line(f"and {len(changed) - _ROWS} more, which {where} lists")
    for text in report.notes:
        wrapped(text, "dim")
