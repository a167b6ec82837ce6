"""Numbers per output and group, in the order of the tiles of src/layout.h."""

from __future__ import annotations

import torch
from torch import Tensor

#: Outputs per tile.
TILE = 32


def in_tiles(values: Tensor) -> Tensor:
    """Return values [N, groups] as [ceil(N / 32), groups, 32]; missing outputs are 0."""
    tiles = -(-len(values) // TILE)
    padded = torch.nn.functional.pad(values, (0, 0, 0, tiles * TILE - len(values)))
    return padded.view(tiles, TILE, -1).transpose(1, 2).contiguous()
