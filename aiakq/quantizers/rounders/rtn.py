"""RTN: rounds every weight to the nearest code of its group.

It needs no calibration. At 8 bits with one scale per row it loses almost nothing, because the largest weight of a row
is rarely far from the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aiakq.constraints import declare
from aiakq.quantizers.block.decoder_block import BlockPart, DecoderBlock
from aiakq.quantizers.numerics.rounding import Rounding
from aiakq.quantizers.recipe import Recipe, Rounder
from aiakq.spec import LayerSpec


@dataclass(frozen=True)
class Rtn(Rounder):
    """Round to nearest.

    scale_search  ``minmax`` uses the full range of a group; ``near`` also ranges within 1 % of it and ``mse`` smaller
                  ones down to half of it, by the error of its weights.
    signed        whether ``mse`` may choose negative scales for symmetric codes of at most 4 bits.
    """

    scale_search: str = declare("minmax", choices=("minmax", "mse", "near"))
    signed: bool = True

    name = "rtn"
    needs_inputs = False
    takes_clip = True
    by_parts = True
    restartable = True

    def refusal(self, recipe: Recipe, scheme: LayerSpec) -> str | None:
        if recipe.clips and self.scale_search != "minmax":
            return "a transform before it chooses the ranges already"
        return None

    def round(self, block: DecoderBlock, part: BlockPart) -> None:
        tasks: dict[str, Callable[[], Rounding]] = {}
        for name in part.linears:
            if self.scale_search == "minmax":
                tasks[name] = partial(block.rtn, name, block.clip.pop(name, None))
            else:
                tasks[name] = partial(block.rtn_searched, name, self.scale_search == "near", self.signed)
        block.finish_shared(tasks)
