"""Shapes of a model's linears, and zero padding of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearShape:
    """One linear that will be quantized: its name, outputs N, inputs K, and whether tensor parallelism cuts its K."""

    name: str
    n: int
    k: int
    row_parallel: bool


def pad(tensor: Tensor, shape: Sequence[int], widths: Mapping[str, tuple[int, int]], name: str = "") -> Tensor:
    """``tensor`` of the source with zeros wherever ``shape`` is wider by a padding of ``widths``.

    A dimension that holds gate and up one after the other is padded at the end of each. The tensor comes back as it is
    where nothing is to be padded, and also where its shape differs from ``shape`` for another reason.
    """
    if tensor.dim() != len(shape):
        return tensor
    for dim, (have, want) in enumerate(zip(tensor.shape, shape, strict=True)):
        if have == want:
            continue
        for old, new in widths.values():
            if (have, want) == (old, new):
                tensor = _widened(tensor, dim, new)
                break
            if (have, want) == (2 * old, 2 * new) and "gate_up_proj" in name:
                tensor = torch.cat([_widened(half, dim, new) for half in tensor.split(old, dim)], dim)
                break
        else:
            return tensor
    return tensor


def _widened(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = list(tensor.shape)
    missing[dim] = size - tensor.shape[dim]
    return torch.cat([tensor, tensor.new_zeros(missing)], dim)
