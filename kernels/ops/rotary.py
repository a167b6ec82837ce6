"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): torch reference.

It has no registry: keys are rotated while being written to the KV cache, whose memory layout belongs to the attention
implementation, so each of those has its own rotation (attention.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.types import RotaryTables


def rotary_factors(tables: RotaryTables, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, 1, R] in ``dtype`` for tokens at ``positions`` [T] int64."""
    factors = (table[positions].to(dtype) for table in (tables.cosines, tables.sines))
    if tables.interleaved:
        cosines, sines = (x.repeat_interleave(2, dim=-1).unsqueeze(1) for x in factors)
    else:
        cosines, sines = (torch.cat((x, x), dim=-1).unsqueeze(1) for x in factors)
    return cosines, sines


def apply_rotary(x: Tensor, factors: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Rotate the first R elements of every head of x [T, H, D] by ``rotary_factors`` -> [T, H, D]."""
    cosines, sines = factors
    rotated = cosines.shape[-1]
    rotary_part, rest = x[..., :rotated], x[..., rotated:]
    if interleaved:
        first, second = rotary_part[..., ::2], rotary_part[..., 1::2]
        partners = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = rotary_part.chunk(2, dim=-1)
        partners = torch.cat((-second, first), dim=-1)
    rotary_part = rotary_part * cosines + partners * sines
    return torch.cat((rotary_part, rest), dim=-1) if rest.shape[-1] else rotary_part
