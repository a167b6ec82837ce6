"""Rounds weights in 16 or 32 bits while they are loaded: few passes over each, and no calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.cpu import rounding as native
from aiakq.kernels.types import QWeight
from aiakq.rounding.integers import codes_for, grouped, ranges, rows_at_once, scales_for, smallest_scale
from aiakq.rounding.ranges import round_searched
from aiakq.spec import LayerSpec

#: The largest number of e4m3.
_LARGEST = 448.0


def rounded(weight: Tensor, bias: Tensor | None, layer: LayerSpec) -> QWeight:
    """Return ``weight`` [N, K] rounded as ``layer`` says, with ``bias`` [N]; both are not modified.

    At 8 bits every row has its full range. Below, the range of each group is searched by the error of its weights.
    Scales hold numbers of the weight's dtype, as those that ``aiakq quantize`` writes, and for 8-bit floats of float32.
    """
    if layer.float8 is not None:
        return _floats(weight, bias)
    k = weight.shape[1]
    size = k if layer.group_size == -1 else layer.group_size
    if layer.bits == 8:
        codes, scales = _full_range(weight, size)
    else:
        codes, scales = _searched(weight, layer.bits, size)
    return QWeight(f"w{layer.bits}a16", codes, scales.to(weight.dtype), bias=bias, group_size=size)


def _full_range(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return codes [N, K] uint8 and scales [N, K / G] of ``round_weight``, a few rows at a time.

    Torch's loops over tensors that fit into a cache would wake its threads for each.
    """
    if native.supports(weight):
        codes, scales = native.round_rows(weight.reshape(-1, size), smallest_scale(weight.dtype))
        return codes.view(weight.shape), scales.view(len(weight), -1)
    low, high = ranges(grouped(weight, size), symmetric=True)
    scales, zeros = scales_for(low.float(), high.float(), 8, True, weight.dtype)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    step = rows_at_once(weight)
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        values = grouped(weight[rows].float(), size)
        codes[rows] = codes_for(values, scales[rows].unsqueeze(-1), zeros[rows].unsqueeze(-1), 8).flatten(1)
    return codes, scales


def _searched(weight: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(len(weight), weight.shape[1] // size)
    step = 16 * rows_at_once(weight)
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        part = weight[rows].float()
        codes[rows], scales[rows], _ = round_searched(part, bits, size, True, weight.dtype, signed=True)
    return codes, scales


def _floats(weight: Tensor, bias: Tensor | None) -> QWeight:
    """Return e4m3 codes with one scale per row, max|w| / 448; a row of zeros has the scale 1."""
    scales = weight.abs().amax(1, keepdim=True).float() / _LARGEST
    scales = torch.where(scales == 0, torch.ones_like(scales), scales).clamp(min=torch.finfo(torch.float32).tiny)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    step = rows_at_once(weight)
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        codes[rows] = weight[rows].float().div_(scales[rows]).clamp_(-_LARGEST, _LARGEST).to(codes.dtype)
    return QWeight(
        "fp8a16",
        codes.view(torch.uint8),
        scales,
        bias=bias,
        group_size=weight.shape[1],
        code_type=torch.float8_e4m3fn,
    )
