"""GPTQ: rounds one input column at a time and compensates the error in the columns that follow.

Frantar et al. 2022 (arXiv:2210.17323), algorithm 1, with lazy updates in blocks. Inside a decoder block it is truly
sequential: query, key and value first, then the attention output, then gate and up, then down, each from inputs that
already passed through what was rounded before. The loop itself is in numerics/gptq.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from aiakq.quantizers.block.decoder_block import BlockPart, DecoderBlock
from aiakq.quantizers.numerics.gptq import GptqSettings, gptq
from aiakq.quantizers.recipe import SCALE_SEARCHES, Rounder

ACT_ORDERS = ("none", "static", "group")
#: name of a linear -> the Hessian [K, K] of its inputs, and what GPTAQ adds to it (None without).
Hessians = Callable[[str], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Gptq(Rounder):
    """GPTQ.

    act_order     ``static`` takes columns by importance, ``group`` inside and between groups, ``none`` as they are;
                  none of them leaves a trace in the file.
    damp          the part of its mean diagonal that is added to the Hessian.
    sweeps        how often all columns are gone over again once they are rounded; 0 as published. Four gain little more
                  than two.
    scale_search  ``minmax`` takes the whole range of a group, ``mse`` also smaller ones, by the loss of its columns.
    """

    act_order: str = "group"
    damp: float = 0.01
    sweeps: int = 2
    scale_search: str = "mse"

    name = "gptq"
    bits = (4, 8, 3, 2)

    def __post_init__(self) -> None:
        self.require(self.act_order in ACT_ORDERS, "act_order", "one of " + ", ".join(ACT_ORDERS))
        self.require(0.0 < self.damp <= 1.0, "damp", "above 0 and at most 1", "0.01 is usual.")
        self.require(0 <= self.sweeps <= 100, "sweeps", "between 0 and 100")
        self.require(self.scale_search in SCALE_SEARCHES, "scale_search", f"one of {', '.join(SCALE_SEARCHES)}")

    def round(self, block: DecoderBlock, part: BlockPart) -> None:
        hessians = self._hessians(block)
        for group in part.groups:
            hessian, drift = hessians(group[0])
            for names in block.same_scheme(group):
                self._round_together(block, names, hessian, drift)
            del hessian, drift
        for name in part.linears:
            if name not in block.result.finished:
                block.finish(name, block.rtn(name))

    def _hessians(self, block: DecoderBlock) -> Hessians:
        return lambda name: (block.inputs.hessians([name], keep=True)[name], None)

    def _round_together(
        self, block: DecoderBlock, names: tuple[str, ...], hessian: Tensor, drift: Tensor | None
    ) -> None:
        """Round linears that share an input and are stored alike as one matrix."""
        spec = block.spec(names[0])
        settings = GptqSettings(
            spec.bits,
            spec.group_size,
            spec.symmetric,
            block.plan.scales,
            self.act_order,
            self.damp,
            search=self.scale_search == "mse",
            sweeps=self.sweeps,
        )
        rounded = gptq([block.weight(name) for name in names], hessian, settings, drift)
        where = f"{block.prefix}.{names[0]}"
        warnings = block.result.warnings
        if rounded.damp is None:
            warnings.append(
                f"The Hessian of {where} could not be factored; the layer was quantized with round-to-nearest (RTN)."
            )
        elif rounded.damp > self.damp:
            warnings.append(f"The Hessian of {where} needed a damping of {rounded.damp:g}.")
        for name in names:
            block.result.remark(name, damp="none: RTN" if rounded.damp is None else rounded.damp)
        sizes = [block.linears[name].out_features for name in names]
        parts = [tensor.split(sizes) for tensor in (rounded.codes, rounded.scales, rounded.zeros)]
        del rounded
        for name, codes, scales, zeros in zip(names, *parts, strict=True):
            block.finish(name, (codes.clone(), scales.clone(), zeros.clone()))
