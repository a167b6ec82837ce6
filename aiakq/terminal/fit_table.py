"""The table of ``aiakq inspect --fit``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from aiakq.errors import error
from aiakq.errors.kind import RESOURCES
from aiakq.terminal import console, quality_tables
from aiakq.terminal.console import facts, number, show, size, table

if TYPE_CHECKING:
    from aiakq.arguments.checkpoint import InspectArguments
    from aiakq.runtime.build.fit import FitReport


def fit_table(report: FitReport) -> None:
    """Print whether a model fits a machine, and what fits in every scheme."""
    known = report.machine
    rows: dict[str, object] = {
        "machine": f"{known.name}, {size(known.nbytes)} ({known.source})",
        "KV cache": f"{size(report.kv_bytes_per_token)} per token",
        "fits": f"{'yes' if report.fits else 'no'}, with sequences of {number(report.wanted)} tokens",
    }
    facts("fit", rows)
    grid = table("weights as", "size", "KV tokens", "longest sequence", f"sequences of {report.wanted}", "fits")
    for row in report.rows:
        grid.add_row(
            row.scheme,
            size(row.weights),
            number(row.tokens),
            number(row.context),
            number(row.sequences),
            "yes" if row.fits else "no",
        )
    show(grid)
    text = (
        f"As the engine computes it: {report.utilization:.0%} of what the weights leave, less the activations of a "
        "step. What loading takes besides is not counted."
    )
    quality_tables.wrapped(text, "dim")


def show_fit(arguments: InspectArguments, as_json: bool) -> None:
    """Print how a model fits a machine; exit with code 5 if it does not. Raises ``option_conflict``."""
    from aiakq.runtime.build.fit import fit

    if arguments.fit is None:
        reason, hint = "it says how many tokens must fit", "Give --fit MACHINE."
        raise error("option_conflict", option="--fit-context", other="no --fit", reason=reason, hint=hint)
    asked = arguments.fit_context, arguments.revision, arguments.device, arguments.dtype
    report = fit(arguments.model, arguments.fit, *asked)
    with console.results_on_stdout(not as_json):
        fit_table(report)
    if as_json:
        console.emit({"schema_version": 1, "kind": "inspect fit", "model": arguments.model, **report.document()})
    if not report.fits:
        raise typer.Exit(RESOURCES)
