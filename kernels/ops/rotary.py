"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): torch reference.

It has no registry of its own: keys are rotated on their way into the KV cache, whose layout in memory is up to the
implementation of attention, so that brings its own (attention.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.types import RotaryTables


def rotary_factors(tables: RotaryTables, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, R] in ``dtype`` for tokens at ``positions`` [T] int64."""
    found = (table[positions].to(dtype) for table in (tables.cosines, tables.sines))
    if tables.interleaved:
        cosines, sines = (x.repeat_interleave(2, dim=-1).unsqueeze(1) for x in found)
    else:
        cosines, sines = (torch.cat((x, x), dim=-1).unsqueeze(1) for x in found)
    return cosines, sines


def apply_rotary(x: Tensor, factors: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Rotate the first R elements of every head of x [T, H, D] by ``rotary_factors``; returns [T, H, D]."""
    cosines, sines = factors
    rotated = cosines.shape[-1]
    turned, rest = x[..., :rotated], x[..., rotated:]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
        partners = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        partners = torch.cat((-second, first), dim=-1)
    turned = turned * cosines + partners * sines
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
