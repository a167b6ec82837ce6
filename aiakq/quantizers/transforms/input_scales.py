"""Stores static scales of activations that are rounded to floats: one for FP8, the unit of computed ones for NVFP4.

They cover the largest input of the calibration, as those of llm-compressor do. Linears that share an input share it,
because servers join them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.ops.block_floats import LARGEST
from aiakq.quantizers.block.decoder_block import BlockPart, DecoderBlock
from aiakq.quantizers.block.statistics import Statistic
from aiakq.quantizers.recipe import Recipe, Transform
from aiakq.spec import LayerSpec


@dataclass(frozen=True)
class InputScales(Transform):
    """Static scales of activations that are rounded to floats."""

    name = "input_scales"
    stores_input_scales = True

    def refusal(self, recipe: Recipe, scheme: LayerSpec) -> str | None:
        return None if scheme.is_float else "its scales are those of activations that are rounded to floats"

    def apply(self, block: DecoderBlock, part: BlockPart) -> None:
        stored = [name for name in part.linears if block.spec(name).static_input]
        shown = {name: group[0] for group in part.groups for name in group}
        seen = {shown[name]: _peak() for name in stored if name in shown}
        sums = block.inputs.gather(seen) if seen else {}
        peaks = {name: float(totals[0]) for name, (_, totals) in sums.items()}
        # An expert that no token reaches takes what suits the inputs of all.
        highest = max(peaks.values(), default=1.0)
        for name in stored:
            peak = peaks.get(shown.get(name, ""), highest) or 1.0
            scale = _scale(peak, block.spec(name).layer)
            block.input_scales[name] = scale
            block.result.remark(name, input_scale=float(scale))


def _peak() -> Statistic:
    """Return the statistic of the largest magnitude of a linear's inputs, a scalar."""

    def add(totals: list[Tensor], rows: Tensor, batch: int) -> None:
        torch.maximum(totals[0], rows.abs().amax().to(totals[0].device), out=totals[0])

    return Statistic(lambda: [torch.zeros(())], add, maximum=True)


def _scale(peak: float, layer: LayerSpec) -> Tensor:
    """Return the stored scale, a float32 scalar, of inputs of at most ``peak``."""
    highest = torch.tensor(peak, dtype=torch.float32)
    if layer.scale_type == "e4m3":
        return LARGEST["e4m3"] * LARGEST["e2m1"] / highest
    return highest / LARGEST["e4m3"]
