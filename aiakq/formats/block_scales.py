"""The scales of small groups as files store them: powers of two in e8m0, and multiples of one number in e4m3."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.formats.checks import mismatch

_LARGEST = 448.0
#: Rounding errors of the products of two numbers in float32 that are not exact in another order.
_TOLERANCE = 2.0**-22


def exponents_of(scales: Tensor) -> Tensor:
    """Return the bits [N, ng] uint8 of scales that are powers of two. Raises ``tensor_mismatch`` for others."""
    fractions, exponents = torch.frexp(scales.to(torch.float64))
    bits = exponents + 126
    if not bool(((fractions == 0.5) & (bits >= 0) & (bits <= 254)).all()):
        raise mismatch("linear", "weight has scales that are not powers of two, which MX formats need")
    return bits.to(torch.uint8)


def as_e4m3(scales: Tensor, reciprocal: bool, unit: float | None = None) -> tuple[Tensor, Tensor]:
    """Split scales [N, ng] into e4m3 numbers [N, ng] and their common unit [1] float32.

    reciprocal  whether readers divide the numbers by the unit instead of multiplying.
    unit        the unit by which the scales were e4m3 numbers divided, which is taken if it fits, so that linears which
                servers join keep one that they have in common; None: any that fits.

    The result gives these scales again: exactly, or to one rounding in float32 if they were computed the other way
    round. Raises ``tensor_mismatch`` if there is no such unit.
    """
    wanted = scales.to(torch.float32)
    if unit is not None:
        given = torch.tensor(unit if reciprocal else 1 / unit, dtype=torch.float32, device=scales.device)
        codes, away = _in_units(wanted, given, reciprocal)
        if away <= _TOLERANCE:
            return codes, given.reshape(1)
    highest = wanted.abs().max().to(torch.float64)
    if not bool(torch.isfinite(highest)) or float(highest) == 0:
        raise mismatch("linear", "weight has no scale but 0, or infinite ones")
    numbers = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    best: tuple[float, Tensor, Tensor] | None = None
    # Quantizers make the largest scale the largest number, so that the first candidate is nearly always the one.
    for number in numbers.flip(0).tolist():
        for tried in _candidates(number / highest if reciprocal else highest / number):
            codes, away = _in_units(wanted, tried, reciprocal)
            if best is None or away < best[0]:
                best = away, codes, tried
            if away == 0:
                return codes, tried.reshape(1)
        if best is not None and best[0] <= _TOLERANCE:
            break
    if best is None or best[0] > _TOLERANCE:
        raise mismatch("linear", "weight has scales that are not e4m3 numbers times one number, which NVFP4 needs")
    return best[1], best[2].reshape(1)


def _in_units(wanted: Tensor, unit: Tensor, reciprocal: bool) -> tuple[Tensor, float]:
    """Return the e4m3 numbers nearest to scales [N, ng] in ``unit``, and the largest relative error of them."""
    numbers = wanted.to(torch.float64) * unit if reciprocal else wanted.to(torch.float64) / unit
    codes = numbers.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    found = codes.to(torch.float32) / unit if reciprocal else codes.to(torch.float32) * unit
    return codes, float(((found - wanted).abs() / wanted.abs().clamp(min=torch.finfo(torch.float32).tiny)).max())


def _candidates(unit: Tensor) -> list[Tensor]:
    """Return the float32 numbers nearest to ``unit`` that are positive and finite."""
    near = unit.to(torch.float32)
    steps = [near]
    for direction in (torch.inf, -torch.inf):
        other = near
        for _ in range(2):
            other = torch.nextafter(other, torch.tensor(direction))
            steps.append(other)
    return [each for each in steps if bool(torch.isfinite(each)) and float(each) > 0]
