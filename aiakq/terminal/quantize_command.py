"""``aiakq quantize``: runs the quantization, or says what it would do, and prints a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.terminal import console, tables
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.common import JsonArguments
    from aiakq.arguments.quantize import DryRunArguments, QuantizeArguments
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.progress import OnProgress
    from aiakq.quantizers.report.records import QuantizeReport


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
    with console.ProgressBars("quantize") as bars:
        report = _run(options, lambda p: bars.update(p.stage, p.done, p.total, p.detail))
    with console.results_on_stdout(not output.json):
        tables.quantize_report(report)
    if output.json:
        console.emit({"schema_version": 1, "kind": "quantize", **report.document()})


def _run(options: QuantizeOptions, progress: OnProgress) -> QuantizeReport:
    # Slow imports, deferred until the options are validated.
    if options.preset.blocks is not None:
        from aiakq.convert.gguf.quantization import quantize_to_gguf

        return quantize_to_gguf(options, progress)
    from aiakq.quantizers.pipeline import quantize_checkpoint

    return quantize_checkpoint(options, progress)


def _dry_run(options: QuantizeOptions, as_json: bool) -> None:
    import aiakq.quantizers.pipeline  # noqa: F401  # a part of the memory of a run
    from aiakq.quantizers.dry_run import dry_run
    from aiakq.terminal.dry_run_table import dry_run_table

    with console.waiting("reading headers"):
        if options.preset.blocks is None:
            result = dry_run(options)
        else:
            from aiakq.convert.gguf.block_plan import block_spec, block_type, blocks_folder

            wanted = block_type(options)
            result = dry_run(blocks_folder(options), lambda prepared: block_spec(prepared, wanted))
            result.output = options.output
    with console.results_on_stdout(not as_json):
        dry_run_table(result)
    if as_json:
        console.emit({"schema_version": 1, "kind": "quantize dry run", **result.document()})
