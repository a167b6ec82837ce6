"""Inputs rounded to small floats with a scale per layer, row or group: torch reference for FP8, MXFP4, MXFP8 and NVFP4.

Activations are rounded to e4m3 with a stored scale, or with scales computed from them, as compressed-tensors,
DeepSeek-V3 and FBGEMM do: x / scale, cut off at +-448, rounded to the nearest e4m3 with ties to even, times scale.

The formats are those of OCP Microscaling Formats, version 1.0, and of NVIDIA's NVFP4. How scales are chosen follows the
publishers' own code: compressed-tensors (quantization/utils) and ModelOpt (quantization/qtensor). All in float32.
Integers with a zero point, or beside weights of fewer bits, are those of compressed-tensors, or of torchao
(quantization/quant_primitives.py).
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


def round_inputs(x: Tensor, input_scale: Tensor | None, rounding: InputRounding) -> Tensor:
    """Return x [M, K] rounded to e4m3, or what ``rounding`` says, times a scale, as float32.

    input_scale  scalar, the scale of all, or the unit of scales in e4m3; None: ``rounding`` says how they are computed.
    """
    values = x.to(torch.float32)
    if rounding.elements in ("int8", "uint8"):
        return _rounded_to_integers(values, input_scale, rounding)
    if rounding.scales != "float32":
        return round_blocks(values, input_scale, rounding)
    if input_scale is not None:
        return _rounded_to_e4m3(values, input_scale.to(torch.float32).reshape(1, 1))
    k = values.shape[1]
    size = rounding.group or k
    padded = F.pad(values, (0, -k % size)).view(len(values), -1, size)
    scale = padded.abs().amax(-1, keepdim=True).clamp_(max=rounding.bound).div_(LARGEST["e4m3"])
    scale.clamp_(min=rounding.min_scale)
    if rounding.powers_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return _rounded_to_e4m3(padded, scale).flatten(1)[:, :k]


def _rounded_to_integers(x: Tensor, input_scale: Tensor | None, rounding: InputRounding) -> Tensor:
    """Return x [M, K] float32 rounded to -128 .. 127 around a zero point; scales and zero points are those of
    ``calculate_qparams`` of compressed-tensors or of ``choose_qparams_affine`` of torchao (``inverse``), one of each
    per row and group."""
    k = x.shape[1]
    size = rounding.group or k
    values = F.pad(x, (0, -k % size)).view(len(x), -1, size)
    if input_scale is not None:
        scale, zero = input_scale.to(torch.float32), torch.tensor(float(rounding.zero), device=x.device)
    else:
        low, high = values.amin(-1, keepdim=True).clamp_(max=0), values.amax(-1, keepdim=True).clamp_(min=0)
        if rounding.elements == "int8":
            scale, zero = (torch.maximum(-low, high) / 127.5).clamp_(min=rounding.min_scale), torch.zeros_like(low)
        else:
            scale = ((high - low) / 255).clamp_(min=rounding.min_scale)
            zero = -128 - (low / scale).round_() if rounding.inverse else (-128 - low / scale)
            zero = zero.clamp_(-128, 127).round_().nan_to_num_(0.0)
        scale = torch.where(scale == 0, torch.full_like(scale, torch.finfo(torch.float32).eps), scale)
    if rounding.inverse:
        codes = ((values * (1.0 / scale)).round_() + zero).clamp_(-128, 127)
    else:
        codes = (values / scale + zero).round_().clamp_(-128, 127)
    return ((codes - zero) * scale).flatten(1)[:, :k]


def _rounded_to_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    scaled = (values / scale).clamp_(-LARGEST["e4m3"], LARGEST["e4m3"])
    return scaled.to(torch.float8_e4m3fn).to(torch.float32) * scale


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
    """Return x [M, ...], at most 6 in magnitude, rounded to the nearest e2m1, ties to even."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2**(exponents - 127) float32 of exponents [N, G] int32, 0 .. 254, which are the bits of e8m0."""
    # The lowest is no normal number in float32.
    bits = torch.where(exponents == 0, torch.full_like(exponents, 1 << 22), exponents << 23)
    return bits.view(torch.float32)


def _powers(highest: Tensor, exponent: int) -> Tensor:
    """Return the scales of groups whose max|x| is ``highest``, rounded up to a power of two from 1.75 times the lower
    one.
    """
    biased = (highest.contiguous().view(torch.int32) + (1 << 21)) >> 23
    return torch.where(highest.isfinite(), power_of_two((biased - exponent).clamp_(0, 254)), highest)


def _in_units(highest: Tensor, unit: Tensor, largest: float, rounding: InputRounding) -> Tensor:
    """Return scales that are e4m3 numbers times or, if ``rounding.reciprocal``, divided by ``unit``."""
    wanted = highest / largest * unit if rounding.reciprocal else highest / (largest * unit)
    codes = wanted.clamp_(rounding.min_scale, LARGEST["e4m3"]).to(torch.float8_e4m3fn).to(torch.float32)
    codes = torch.where(codes == 0, torch.full_like(codes, _UNDERFLOWED), codes)
    return codes / unit if rounding.reciprocal else codes * unit
