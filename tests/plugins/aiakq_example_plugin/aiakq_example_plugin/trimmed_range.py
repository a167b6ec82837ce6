"""A quantization method. Every group keeps only a share of its range, which makes the steps of the rest finer."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import pad

from aiakq.quantizers.block.decoder_block import BlockPart, DecoderBlock
from aiakq.quantizers.recipe import Component, Method, Transform


@dataclass(frozen=True)
class TrimRange(Transform):
    """Clip every group at a share of its largest magnitude.

    share  of the magnitude, above 0 and at most 1.
    """

    share: float = 0.9

    name = "trim_range"
    needs_inputs = False

    def __post_init__(self) -> None:
        self.require(0.0 < self.share <= 1.0, "share", "above 0 and at most 1")

    @property
    def clips(self) -> bool:
        return True

    def apply(self, block: DecoderBlock, part: BlockPart) -> None:
        """See Transform: fills ``block.clip`` with [N, K / G] for every linear of ``part``."""
        for name in part.linears:
            weight, size = block.weight(name), block.spec(name).group_size
            size = weight.shape[1] if size == -1 else size
            groups = pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
            block.clip[name] = self.share * groups.abs().amax(-1)


TRIMMED_RTN = Method(
    summary="Weights were rounded to the nearest step within nine tenths of their group's range.",
    transforms=(Component("trim_range"),),
    rounder=Component("rtn"),
    bits=(4, 8),
    group_size=32,
    symmetric=(True,),
)
