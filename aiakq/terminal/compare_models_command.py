"""``aiakq compare``: measures several models and prints a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiakq.terminal import console
from aiakq.terminal.options import with_arguments
from aiakq.terminal.quality_tables import wrapped

if TYPE_CHECKING:
    from aiakq.arguments.common import JsonArguments
    from aiakq.arguments.model_comparison import ModelComparisonArguments


@with_arguments("compare")
def compare(arguments: ModelComparisonArguments, output: JsonArguments) -> None:
    """Compare models: size, bits per weight, KL divergence with its interval, perplexity, tokens per second."""
    from aiakq.arguments.server import checked
    from aiakq.bench import models
    from aiakq.formats.hub import check_model_name

    for model in filter(None, (*arguments.models, arguments.original)):
        check_model_name(model)
        checked({"model": model, "dtype": arguments.dtype, "device": arguments.device}, server=False)
    models.check(arguments)
    with console.ProgressBars("compare") as bars:
        document = models.run(arguments, bars.update).document()
    with console.results_on_stdout(not output.json):
        _show(document, models.cells(document))
    models.write(document, arguments.paths)
    if output.json:
        console.emit(document)


def _show(document: Mapping[str, Any], cells: list[list[str]]) -> None:
    head, *rows = cells
    grid = console.table(*head, left=[head.index(name) for name in ("model", "quantization") if name in head])
    for name, (_, *others) in zip(_short_names([row[0] for row in rows]), rows, strict=True):
        grid.add_row(*map(console.plain, (name, *others)))
    console.show(grid)
    for remark in document["remarks"]:
        wrapped(remark, "dim")


def _short_names(paths: list[str]) -> list[str]:
    """Return the last parts of paths, as many of each as tell them apart: the table has no space for folders."""
    parts = [path.rstrip("/").split("/") for path in paths]
    for count in range(1, max(map(len, parts), default=1)):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(paths)):
            return names
    return paths
