"""aiakq itself, measured as the other tools are: a process of its own, the same request, the same result."""

from __future__ import annotations

from typing import Any

import job
import transformers  # noqa: F401  (imported before the clock starts, as in the other scripts)

from aiakq import quantizers
from aiakq.quantizers import pipeline
from aiakq.quantizers.block import BlockWork
from aiakq.quantizers.options import QuantizeOptions


class PlainRounding:
    """A method that only rounds, at whatever width and grouping the options say."""

    blocks = 0

    @classmethod
    def quantize_block(cls, work: BlockWork) -> None:
        cls.blocks += 1
        for name in work.linears:
            work.finish(name, *work.round_plainly(name))


def quantize(request: dict[str, Any]) -> None:
    """``options`` are those of QuantizeOptions; ``plain`` replaces the method by rounding to the same grid."""
    if request["plain"]:
        quantizers.load = lambda method: PlainRounding
    options = QuantizeOptions(
        input=request["model"],
        output=request["output"],
        token_ids=request["calibration"],
        samples=len(job.calibration(request)),
        overwrite=True,
        evaluate=False,
        **request["options"],
    )
    pipeline.quantize_checkpoint(options)
    assert bool(PlainRounding.blocks) == request["plain"], "the pipeline took another method"


if __name__ == "__main__":
    job.run(("torch", "transformers"), quantize)
