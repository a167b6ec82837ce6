"""The table of ``aiakq quantize --dry-run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.evaluation.wording import counted
from aiakq.terminal import quality_tables
from aiakq.terminal.console import facts, number, result_line, seconds, show, size, table, warning

if TYPE_CHECKING:
    from aiakq.quantizers.dry_run import DryRun


def dry_run_table(result: DryRun) -> None:
    """Print what a run would do, and the memory of its stages."""
    before = f"{size(result.bytes_before)} before"
    least = result.seconds_at_least
    rows: dict[str, object] = {
        "method": f"{result.method}, {result.format} format",
        "layers": "; ".join(
            f"{counted(each.layers, 'layer')} ({number(each.weights)} weights) {each.scheme or 'not quantized'}"
            for each in result.schemes
        ),
        "bits per weight": f"{result.bits_per_weight:.2f} in quantized layers",
        "size": f"{before}, {size(result.output_bytes)} after",
        "download": size(result.download_bytes) if result.download_bytes else None,
        "free disk needed": size(result.disk_bytes),
        "calibration": f"{number(result.tokens)} tokens" if result.tokens else "none",
        "peak memory": size(result.peak_memory_bytes) if result.stages else f"not known: {result.memory_reason}",
        "time": "not known" if least is None else f"at least {seconds(least)}",
    }
    facts("quantize would do", rows)
    if result.stages:
        grid = table("stage", "memory", "largest moment", left=(0, 2))
        for stage in result.stages:
            grid.add_row(stage.name, size(result.resident_bytes + stage.nbytes), stage.moment)
        show(grid)
        text = (
            f"{size(result.resident_bytes)} of that is the process itself, measured; the rest is counted from shapes."
        )
        quality_tables.wrapped(text, "dim")
    if result.time_basis:
        quality_tables.wrapped(f"Time: {result.time_basis}.", "dim")
    for text in result.warnings:
        warning(text)
    result_line("nothing was written")
