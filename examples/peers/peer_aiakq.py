"""Quantize with aiakq, measured like the other tools: in its own process, with the same request and result."""

from __future__ import annotations

from typing import Any

import job
import transformers  # noqa: F401  (imported before the clock starts, as in the other scripts)

from aiakq.quantizers import pipeline
from aiakq.quantizers.block.decoder_block import BlockPart, DecoderBlock
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.recipe import Recipe
from aiakq.quantizers.rounders.rtn import Rtn


class CountingRtn(Rtn):
    """Round to nearest, at the width and grouping of the options, counting blocks."""

    blocks = 0

    def round(self, block: DecoderBlock, part: BlockPart) -> None:
        CountingRtn.blocks += 1
        super().round(block, part)


def quantize(request: dict[str, Any]) -> None:
    """``options`` are those of QuantizeOptions; ``plain`` only rounds to nearest, on the same grid."""
    options = QuantizeOptions(
        input=request["model"],
        output=request["output"],
        token_ids=request["calibration"],
        samples=len(job.calibration(request)),
        overwrite=True,
        evaluate=False,
        **request["options"],
    )
    if request["plain"]:
        vars(options)["resolved_recipe"] = Recipe((), CountingRtn())
    pipeline.quantize_checkpoint(options)
    assert bool(CountingRtn.blocks) == request["plain"], "the pipeline took another method"


if __name__ == "__main__":
    job.run(("torch", "transformers"), quantize)
