"""Rows of blocks of GGUF files, packed into the tiles of a linear layer without codes or floats in between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.block_weight import BlockWeight
from aiakq.kernels.cpu.library import address, load_library
from aiakq.kernels.cpu.scale_steps import narrow
from aiakq.kernels.cpu.tiles import TILE


@dataclass(frozen=True)
class BlockTiles:
    """Scales and offsets [tiles, groups, 32], int8 with steps [tiles, steps, 32] float32, else 16-bit floats."""

    scales: Tensor
    offsets: Tensor | None
    scale_steps: Tensor | None
    offset_steps: Tensor | None


def pack_blocks(weight: BlockWeight, math: int, tiles: Tensor, factor: float) -> BlockTiles:
    """Write the codes of a weight [N, K] to ``tiles`` (src/layout.h), and return the rest.

    math    the LinearMath.
    tiles   [ceil(N / 32) * K / 32 * bits * 128] uint8, is overwritten.
    factor  a power of two by which the scales are multiplied.

    Raises what reading and unpacking the rows raises.
    """
    kind, n, k, count = weight.kind, weight.n, weight.k, -(-weight.n // TILE)
    has_steps, exponents = kind.values > kind.group_size, kind.name == "MXFP4"
    dtype = torch.int8 if has_steps else torch.uint8 if exponents else torch.float16
    scales = torch.zeros(count, k // kind.group_size, TILE, dtype=dtype)
    scale_steps = torch.zeros(count, k // kind.values, TILE, dtype=torch.float16) if has_steps else None
    offsets, offset_steps = None, None
    if kind.has_offsets:
        offsets, offset_steps = torch.zeros_like(scales), None if scale_steps is None else torch.zeros_like(scale_steps)
    rows, starts, files = weight.places()
    failed = load_library().cdll.aiakq_pack_blocks(
        *(address(values) for values in (rows, starts, files)),
        *(n, k, kind.number, math),
        *(address(values) for values in (tiles, scales, offsets, scale_steps, offset_steps)),
        torch.get_num_threads(),
    )
    if failed:
        weight.raise_failure()
    weight.check_unchanged()
    if exponents:
        scales = narrow(torch.exp2(scales.double() - 127).float() * factor)
    elif factor != 1 and not has_steps:
        scales = narrow(scales.float() * factor)
    return BlockTiles(
        scales,
        offsets,
        scale_steps=None if scale_steps is None else scale_steps.float() * factor,
        offset_steps=None if offset_steps is None else -offset_steps.float(),
    )
