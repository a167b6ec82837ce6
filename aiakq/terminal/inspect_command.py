"""``aiakq inspect``: prints a table or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.terminal import console, tables
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.checkpoint import InspectArguments
    from aiakq.arguments.common import JsonArguments
    from aiakq.runtime.config.engine import EngineConfig


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
    inspection = inspect_checkpoint(
        arguments.model, arguments.revision, arguments.device, arguments.dtype, refusal=_refusal
    )
    with console.results_on_stdout(not output.json):
        tables.inspection(inspection, inspection.layers if arguments.all else collapse(inspection.layers))
    if output.json:
        console.emit(inspection.document())


def _refusal(config: EngineConfig) -> str | None:
    """Return why transformers cannot run a model without a native implementation, or None."""
    from aiakq.runtime.hf.transformers_fallback import refusal

    return refusal(config)
