"""Integer quantization: ranges, scales, zero points, codes, and dequantization.

The scale is computed from the range of a group and rounded to its storage dtype before codes are computed, so that
what is stored is what was optimized. Symmetric codes are centered on 2**(b-1) with ``scale = 2 * absmax / (2**b - 1)``;
asymmetric ones span [min, max], widened to include 0, with a zero point of b bits.
These are the conventions of the published GPTQ code and of compressed-tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Weights processed at a time, so that intermediate results stay in a core's cache, or on a GPU take little memory.
_AT_ONCE, _AT_ONCE_ON_GPU = 2**18, 2**25


def rows_at_once(weight: Tensor) -> int:
    """Return the number of rows of ``weight`` [N, K] to process at a time."""
    return max(1, (_AT_ONCE if weight.device.type == "cpu" else _AT_ONCE_ON_GPU) // weight.shape[1])


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """View [N, K] as [N, K / G, G]; K must be a multiple of G, and -1 means one group per row."""
    groups: Tensor = weight.unflatten(1, (-1, weight.shape[1] if group_size == -1 else group_size))
    return groups


def ranges(groups: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return the range of each group, widened to include 0 and, if ``symmetric``, to be symmetric about 0.

    groups [..., G] -> low and high [...], both float.
    """
    low = groups.amin(-1).clamp(max=0)
    high = groups.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    return low, high


def scales_for(low: Tensor, high: Tensor, bits: int, symmetric: bool, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of each range.

    low, high [...] -> scales [...] float32 holding values of ``storage``, and zeros [...] float32 holding integers.
    An empty range (all weights 0) gets scale 1; one too small for ``storage`` gets its smallest positive number, so
    that no scale is ever 0.
    """
    top = 2**bits - 1
    exact = (high - low) / top
    scales = exact.to(storage).to(torch.float32)
    smallest = smallest_scale(storage)
    scales = torch.where(scales < smallest, torch.full_like(scales, smallest), scales)
    scales = torch.where(exact == 0, torch.ones_like(scales), scales)
    if symmetric:
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        zeros = torch.round(-low / scales).clamp(0, top)
    return scales, zeros


def smallest_scale(storage: torch.dtype) -> float:
    """Return the smallest positive number of ``storage``, of float32 and bfloat16 the smallest normal one."""
    info = torch.finfo(storage)
    return info.smallest_normal * (info.eps if storage == torch.float16 else 1.0)


def codes_for(values: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Return the nearest code of each value, as float: ``round(value / scale) + zero``, clamped to 0 .. 2**b - 1."""
    return (values / scales).round_().add_(zeros).clamp_(0, 2**bits - 1)


#: Codes [N, K] uint8, scales and zeros [N, K / G] float32.
Rounding = tuple[Tensor, Tensor, Tensor]


def round_weight(
    weight: Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    storage: torch.dtype,
    clip: Tensor | None = None,
) -> Rounding:
    """Round every weight to the nearest code of its group (round-to-nearest, RTN).

    weight [N, K] float32; ``clip`` [N, K / G] limits the range of each group to +- that value. Returns codes [N, K]
    uint8, scales [N, K / G] float32 (values of ``storage``) and zeros [N, K / G] float32.
    """
    groups = grouped(weight, group_size)
    low, high = ranges(groups, symmetric)
    if clip is not None:
        low, high = torch.maximum(low, -clip), torch.minimum(high, clip)
    scales, zeros = scales_for(low, high, bits, symmetric, storage)
    codes = codes_for(groups, scales.unsqueeze(-1), zeros.unsqueeze(-1), bits)
    return codes.flatten(1).to(torch.uint8), scales, zeros


def rounded_weight(
    weight: Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    storage: torch.dtype,
    columns: Tensor | None = None,
) -> Tensor:
    """Return a weight [N, K] float32 after RTN, with its columns multiplied by ``columns`` [K] during the rounding."""
    result = torch.empty_like(weight)
    step = rows_at_once(weight)
    for start in range(0, len(weight), step):
        part = weight[start : start + step]
        groups = grouped(part if columns is None else part * columns, group_size)
        scales, zeros = (x.unsqueeze(-1) for x in scales_for(*ranges(groups, symmetric), bits, symmetric, storage))
        values = codes_for(groups, scales, zeros, bits).sub_(zeros).mul_(scales).flatten(1)
        result[start : start + step] = values if columns is None else values.div_(columns)
    return result


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """Return the float32 weight [N, K] of codes [N, K], scales and zeros [N, K / G]."""
    groups = grouped(codes.to(torch.float32), group_size)
    return ((groups - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(1)


def round_activations(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Round x to symmetric 8-bit activations and back: ``round(x / s) * s`` with codes within -128 .. 127.

    x [..., K] float -> the same shape. ``scale`` is one number for all rows; without it each row has its own,
    ``absmax / 127``.
    """
    if scale is None:
        scale = x.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (x / scale).round_().clamp_(-128, 127).mul_(scale)
