"""aiakq itself, measured as the other tools are: a process of its own, the same request, the same result."""

from __future__ import annotations

from typing import Any

import job
import transformers  # noqa: F401  (imported before the clock starts, as in the other scripts)

from aiakq import quantizers
from aiakq.quantizers import pipeline, rounding
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.work import BlockWork


class PlainRounding:
    """A method that only rounds, at whatever width and grouping the options say."""

    @staticmethod
    def quantize_block(work: BlockWork) -> None:
        spec = work.plan.spec
        for name in work.linears:
            rounded = rounding.round_weight(
                work.weight(name), spec.bits, spec.group_size, spec.symmetric, work.plan.scales
            )
            work.finish(name, *rounded)


def quantize(request: dict[str, Any]) -> None:
    """``options`` are those of QuantizeOptions; ``plain`` replaces the method by rounding to the same grid."""
    if request.get("plain"):
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


if __name__ == "__main__":
    job.run(("torch", "transformers"), quantize)
