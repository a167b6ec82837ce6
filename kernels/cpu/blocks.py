"""Rows of blocks of GGUF files, packed into the tiles of a linear layer without codes or floats in between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.block_weight import BlockWeight
from aiakq.kernels.cpu.library import load_library
from aiakq.kernels.cpu.scale_steps import narrow
from aiakq.kernels.cpu.tiles import TILE, in_tiles

@dataclass(frozen=True)
class BlockTiles:
    """Scales and offsets [tiles, groups, 32], int8 with steps [tiles, steps, 32] float32, else float16 or bfloat16."""

    scales: Tensor
    offsets: Tensor | None
    scale_steps: Tensor | None
    offset_steps: Tensor | None


def pack_blocks(weight: BlockWeight, math: int, tiles: Tensor, factor: float) -> BlockTiles:
    """Write the codes of a weight to ``tiles`` (src/layout.h), and return the rest.

    math    the LinearMath.
    factor  a power of two by which the scales are multiplied.
    """
    kind, n, k, count = weight.kind, weight.n, weight.k, -(-weight.n // TILE)
    rows, has_steps = weight.rows.contiguous(), kind.values > kind.group_size
    scales = torch.zeros(count, k // kind.group_size, TILE, dtype=torch.int8 if has_steps else torch.float16)
    offsets = torch.zeros_like(scales) if kind.has_offsets else None
    known = load_library().cdll.aiakq_pack_blocks(
        rows.data_ptr(),
        n,
        k,
        kind.number,
        math,
        tiles.data_ptr(),
        scales.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
        torch.get_num_threads(),
    )
    assert known, f"blocks of the kind {kind.name} are not packed"
    blocks = rows.view(n, -1, kind.nbytes)
    if not kind.halves:
        powers = torch.exp2(blocks[:, :, 0].double() - 127).float()
        scales = in_tiles(narrow(powers * factor))
    elif factor != 1 and not has_steps:
        scales = narrow(scales.float() * factor)
    steps = [in_tiles(_half(blocks, at)) for at in kind.halves] if has_steps else []
    return BlockTiles(
        scales,
        offsets,
        scale_steps=steps[0] * factor if steps else None,
        offset_steps=-steps[1] if len(steps) == 2 else None,
    )


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 number at byte ``at`` of blocks [N, B, bytes] as float32 [N, B]."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).squeeze(2).float()
