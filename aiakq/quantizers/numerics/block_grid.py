"""The grid of codes in blocks of GGUF files: a group is a block, whose parts have scales and minima of their own.

``value = (code - zero) * scale`` with a zero that is no integer: the minimum in units of the scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from aiakq.formats.gguf.block_scales import BlockScales, block_scales

#: Stands for a scale of 0, whose codes make no difference.
_NO_SCALE = 1e-30


@dataclass
class BlockGrid:
    """Codes of ``bits`` in blocks of a kind.

    found  the scales of the blocks that were searched, in the order of the searches.
    """

    kind: str
    bits: int
    found: list[BlockScales] = field(default_factory=list)

    integer_bits: ClassVar[None] = None

    def search(self, groups: Tensor, cost: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return scales and zeros of blocks [N, V] float32: [N, S], or [N] for one scale per block."""
        blocks = block_scales(groups.contiguous(), self.kind, cost)
        self.found.append(blocks)
        scales = torch.where(blocks.scales == 0, torch.full_like(blocks.scales, _NO_SCALE), blocks.scales)
        zeros = blocks.minima / scales
        return (scales[:, 0], zeros[:, 0]) if scales.shape[1] == 1 else (scales, zeros)

    def codes(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return (values / scales).add_(zeros).round_().clamp_(0, 2**self.bits - 1)

    def units(self, codes: Tensor, zeros: Tensor) -> Tensor:
        return codes - zeros

    def stored(self, scales: Tensor) -> Tensor:
        raise NotImplementedError("scales of blocks are not refitted")

    def pack(self, codes: Tensor, order: list[int]) -> Tensor:
        """Return rows of blocks [N, bytes of a row] of codes [N, K]; ``order``: block of each search."""
        width = codes.shape[1] // len(self.found)
        rows = [
            blocks.pack(codes[:, index * width : (index + 1) * width])
            for index, blocks in zip(order, self.found, strict=True)
        ]
        return torch.cat([rows[order.index(index)] for index in range(len(rows))], dim=1)
