"""weight_only_int8: every weight to the nearest of 256 levels, one scale per output row (or per group).

Needs no calibration; 8 bits per row cost next to nothing, because the largest weight of a row is rarely far from the
rest. The calibration pass only measures the error.
"""

from __future__ import annotations

from aiakq.quantizers.block import BlockWork


def quantize_block(work: BlockWork) -> None:
    """Round every linear of the block, in whole ranges unless told to search them."""
    search = work.plan.options.scale_search == "mse"
    for name in work.linears:
        work.finish(name, *(work.round_searched(name) if search else work.round_plainly(name)))
