"""Shapes of a model's linears, and zero padding of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearShape:
    """A linear to quantize: its name, outputs N, inputs K, and whether tensor parallelism splits its inputs."""

    name: str
    n: int
    k: int
    row_parallel: bool


def pad(tensor: Tensor, shape: Sequence[int], widths: Mapping[str, tuple[int, int]], name: str = "") -> Tensor:
    """Pad ``tensor`` of the source with zeros wherever ``shape`` is wider by a padding in ``widths``.

    A dimension that concatenates gate and up is padded at the end of each half. The tensor is returned unchanged if
    nothing is to be padded, and also if its shape differs from ``shape`` for another reason.
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
