"""Inputs rounded to small floats with a shared scale per group: torch reference for MXFP4, MXFP8 and NVFP4.

The formats are those of OCP Microscaling Formats, version 1.0, and of NVIDIA's NVFP4. How scales are chosen follows the
publishers' own code: compressed-tensors (quantization/utils) and ModelOpt (quantization/qtensor). All in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.types import InputRounding

#: Largest value of each kind of element, and its exponent.
LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
EXPONENT = {"e4m3": 8, "e2m1": 2}
#: Scale that compressed-tensors uses in place of one that underflowed.
_UNDERFLOWED = 0.125


def round_blocks(x: Tensor, input_scale: Tensor | None, rounding: InputRounding) -> Tensor:
    """Return x [M, K] float32 rounded to ``rounding.elements`` times the scale of their group, as float32.

    input_scale  scalar float32, the unit of scales in e4m3; None for other scales.
    """
    k = x.shape[1]
    values = F.pad(x, (0, -k % rounding.group)).view(len(x), -1, rounding.group)
    largest = LARGEST[rounding.elements]
    highest = values.abs().amax(-1, keepdim=True)
    if rounding.scales == "e8m0":
        scale = _powers(highest, EXPONENT[rounding.elements])
    else:
        assert input_scale is not None, "scales in e4m3 have a unit"
        scale = _in_units(highest, input_scale.to(torch.float32), largest, rounding)
    scaled = (values / scale).clamp_(-largest, largest)
    rounded = round_e2m1(scaled) if rounding.elements == "e2m1" else scaled.to(torch.float8_e4m3fn).to(torch.float32)
    return (rounded * scale).flatten(1)[:, :k]


def round_e2m1(x: Tensor) -> Tensor:
    """Return x, of any shape and at most 6 in magnitude, rounded to the nearest e2m1, ties to even."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2**(exponents - 127) float32 of exponents 0 .. 254 int32, which are the bits of e8m0."""
    # The lowest is no normal number in float32.
    bits = torch.where(exponents == 0, torch.full_like(exponents, 1 << 22), exponents << 23)
    return bits.view(torch.float32)


def _powers(highest: Tensor, exponent: int) -> Tensor:
    """Return the scales of groups whose max|x| is ``highest``, rounded up to a power of two from 1.75 times the lower
    one.
    """
    biased = (highest.contiguous().view(torch.int32) + (1 << 21)) >> 23
    return power_of_two((biased - exponent).clamp_(0, 254))


def _in_units(highest: Tensor, unit: Tensor, largest: float, rounding: InputRounding) -> Tensor:
    """Return scales that are e4m3 numbers times or, if ``rounding.reciprocal``, divided by ``unit``."""
    wanted = highest / largest * unit if rounding.reciprocal else highest / (largest * unit)
    codes = wanted.clamp_(rounding.min_scale, LARGEST["e4m3"]).to(torch.float8_e4m3fn).to(torch.float32)
    codes = torch.where(codes == 0, torch.full_like(codes, _UNDERFLOWED), codes)
    return codes / unit if rounding.reciprocal else codes * unit
