"""Scales of groups as linear_floats_kernel.py reads them: in 8 bits where those hold them, and else in float32.

Formats hold the scales of 4-bit floats in 8 bits, as powers of two (MXFP4) or as e4m3 numbers in units of one number
(NVFP4), and readers give them as floats. They are found again for each output, because layers that were put together
have units of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: How scales are stored: SCALES in linear_floats_kernel.py.
FLOAT32, E8M0, E4M3 = 0, 1, 2
#: Rounding errors of products and quotients in float32, which tools compute in another order.
_TOLERANCE = 2.0**-22
#: The e4m3 numbers of each significand that are largest.
_HIGHEST = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)


def store(scales: Tensor, codes: Tensor, group: int) -> tuple[Tensor, Tensor, int]:
    """Return ``scales`` [N, groups] of e2m1 ``codes`` [N, K] uint8 as stored, the factor [N] float32 of each output,
    and which kind the stored scales are.

    Stored scales are int32 [N, ceil(groups / 4)] of E8M0 or E4M3, four to a word, the first in the low bits: words,
    unlike bytes, can be copied ahead of their use. Or they are float32 [N, groups], with factors of 1, if neither holds
    all of them. A group without a code but 0 has the scale 0.
    """
    padded = torch.nn.functional.pad(codes & 7, (0, -codes.shape[1] % group))
    used = (padded != 0).view(len(codes), -1, group).any(-1)
    wanted = torch.where(used, scales.to(torch.float32), 0.0)
    kinds = (_as_e4m3, _as_powers) if group == 16 else (_as_powers, _as_e4m3)
    found = next((found for kind in kinds if (found := kind(wanted)) is not None), None)
    if found is None:
        return wanted, torch.ones_like(wanted[:, 0]), FLOAT32
    scales, factors, stored = found
    scales = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4)).contiguous()
    return scales.view(torch.int32), factors, stored


def _as_powers(scales: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """Return powers of two as the bits of e8m0, the largest of an output as 1."""
    mantissas, exponents = torch.frexp(scales.double())
    is_zero = scales == 0
    if not bool(((mantissas == 0.5) | is_zero).all()):
        return None
    highest = exponents.masked_fill(is_zero, -(2**20)).amax(1, keepdim=True)
    highest = highest.masked_fill(is_zero.all(1, keepdim=True), 1)
    bits = (127 + exponents - highest).masked_fill(is_zero, 0)
    if bool((bits < 1)[~is_zero].any()):
        return None
    factors = torch.ldexp(torch.ones_like(scales[:, :1], dtype=torch.float64), highest - 1)
    return bits.to(torch.int8), factors[:, 0].float(), E8M0


def _as_e4m3(scales: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """Return the bits of e4m3 numbers, none negative, times a factor of each output, the largest as large as can be."""
    if bool((scales < 0).any()):
        return None
    wanted = scales.double()
    highest = wanted.abs().amax(1, keepdim=True)
    is_found = torch.zeros_like(highest, dtype=torch.bool)
    codes, factors = torch.zeros_like(wanted, dtype=torch.int8), torch.ones_like(highest)
    for number in _HIGHEST:
        tried = torch.where(highest > 0, (highest / number).float().double(), 1.0)
        numbers = (wanted / tried).clamp_(-448, 448).to(torch.float8_e4m3fn)
        fits = ((numbers.double() * tried - wanted).abs() <= _TOLERANCE * wanted.abs()).all(1, keepdim=True)
        codes = torch.where(fits & ~is_found, numbers.view(torch.int8), codes)
        factors = torch.where(fits & ~is_found, tried, factors)
        is_found |= fits
        if bool(is_found.all()):
            return codes, factors[:, 0].float(), E4M3
    return None
