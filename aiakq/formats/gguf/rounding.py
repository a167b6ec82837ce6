"""Rounding of floats to codes with scales: searches for the smallest squared error, over many groups at once.

Values are [B, G] or [B, S, G] float32: the last dimension shares a scale. A scale is searched over a grid, and for the
codes of each candidate the best scale is that of least squares: for codes q, <x, q> / <q, q>.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Candidates of a scale, as factors of that which covers the largest value.
_SYMMETRIC = torch.linspace(0.7, 1.1, 17).tolist()
_AFFINE = torch.linspace(0.6, 1.05, 16).tolist()
#: Candidates of a scale of scales.
_SUPER = torch.linspace(0.92, 1.08, 9).tolist()
_TINY = 1e-30


def codes_for(values: Tensor, scales: Tensor, minima: Tensor | None, low: int, high: int) -> Tensor:
    """Return the nearest codes for x = code * scale - minimum, as floats; 0, or the nearest, where the scale is 0."""
    shifted = values if minima is None else values + minima.unsqueeze(-1)
    inverse = torch.where(scales.abs() > _TINY, 1 / scales, torch.zeros_like(scales))
    return (shifted * inverse.unsqueeze(-1)).round().clamp(low, high)


def error_of(values: Tensor, codes: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Return the squared error of every group."""
    decoded = codes * scales.unsqueeze(-1)
    if minima is not None:
        decoded -= minima.unsqueeze(-1)
    return (values - decoded).square().sum(-1)


def _keep(best: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return, for every group, the tuple whose first element, the error, is smaller."""
    better = found[0] < best[0]
    return tuple(torch.where(better, new, old) for new, old in zip(found, best, strict=True))


def symmetric_scales(values: Tensor, low: int, high: int) -> Tensor:
    """Return the scales, of either sign, for codes from ``low`` to ``high``."""
    index = values.abs().argmax(-1, keepdim=True)
    peak = values.gather(-1, index).squeeze(-1)
    best: tuple[Tensor, ...] = (torch.full_like(peak, torch.inf), torch.zeros_like(peak))
    for factor in _SYMMETRIC:
        for end in (low, high):
            scales = peak / end * factor
            for _ in range(2):  # with the scale of least squares, other codes may be nearer
                codes = codes_for(values, scales, None, low, high)
                scales = (values * codes).sum(-1) / codes.square().sum(-1).clamp_min(_TINY)
            best = _keep(best, (error_of(values, codes, scales), scales))
    return best[1]


def affine_scales(values: Tensor, high: int, nonnegative: bool) -> tuple[Tensor, Tensor]:
    """Return scales and minima for x = code * scale - minimum, with codes from 0 to ``high``.

    nonnegative  whether minima must not be negative, as those of K kinds.
    """
    low = values.amin(-1)
    low = low.clamp_max(0) if nonnegative else low
    width = (values.amax(-1) - low).clamp_min(0)
    best: tuple[Tensor, ...] = (torch.full_like(low, torch.inf), torch.zeros_like(low), torch.zeros_like(low))
    for factor in _AFFINE:
        scales, minima = width / high * factor, -low * min(factor + 0.05, 1.0)
        for _ in range(2):
            codes = codes_for(values, scales, minima, 0, high)
            scales, minima = _least_squares(values, codes, nonnegative)
        best = _keep(best, (error_of(values, codes, scales, minima), scales, minima))
    return best[1], best[2]


def _least_squares(values: Tensor, codes: Tensor, nonnegative: bool) -> tuple[Tensor, Tensor]:
    """Return the best scales and minima for codes; scales are not negative."""
    count = values.shape[-1]
    sum_q, sum_qq = codes.sum(-1), codes.square().sum(-1)
    sum_x, sum_xq = values.sum(-1), (values * codes).sum(-1)
    determinant = count * sum_qq - sum_q.square()
    solvable = determinant > 0.5  # codes are integers: 0 if they are all equal
    safe = torch.where(solvable, determinant, torch.ones_like(determinant))
    scales = torch.where(solvable, (count * sum_xq - sum_q * sum_x) / safe, torch.zeros_like(safe)).clamp_min(0)
    minima = (scales * sum_q - sum_x) / count
    if nonnegative:
        alone = (sum_xq / sum_qq.clamp_min(_TINY)).clamp_min(0)
        scales, minima = torch.where(minima < 0, alone, scales), minima.clamp_min(0)
    return scales, minima


def half(values: Tensor) -> Tensor:
    """Return values rounded to float16, in float32."""
    return values.clamp(-65504, 65504).half().float()


def super_symmetric(values: Tensor, low: int, high: int, integers: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return d [B], integers [B, S] and codes [B, S, G] for x = code * (d * integer), from values [B, S, G].

    integers  the smallest and largest integer.
    """
    wanted = symmetric_scales(values, low, high)
    peak = wanted.gather(-1, wanted.abs().argmax(-1, keepdim=True)).squeeze(-1)
    total = torch.full_like(peak, torch.inf)
    best_d, best_integers = torch.zeros_like(peak), torch.zeros_like(wanted)
    for factor in _SUPER:
        d = half(peak / integers[0] * factor).unsqueeze(-1)
        nearest = torch.where(d != 0, wanted / d, torch.zeros_like(wanted)).round()
        chosen: tuple[Tensor, ...] = (torch.full_like(wanted, torch.inf), nearest)
        for step in (0, -1, 1):
            tried = (nearest + step).clamp(*integers)
            codes = codes_for(values, d * tried, None, low, high)
            chosen = _keep(chosen, (error_of(values, codes, d * tried), tried))
        better = chosen[0].sum(-1) < total
        total = torch.where(better, chosen[0].sum(-1), total)
        best_d = torch.where(better, d.squeeze(-1), best_d)
        best_integers = torch.where(better.unsqueeze(-1), chosen[1], best_integers)
    return best_d, best_integers, codes_for(values, best_d.unsqueeze(-1) * best_integers, None, low, high)


def super_affine(values: Tensor, high: int, largest: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return d [B], dmin [B], scales [B, S], minima [B, S] and codes [B, S, G] for
    x = code * (d * scale) - dmin * minimum, from values [B, S, G]; scales and minima are integers up to ``largest``.
    """
    wanted, wanted_minima = affine_scales(values, high, nonnegative=True)
    total = torch.full_like(wanted[:, 0], torch.inf)
    dmin = half(wanted_minima.amax(-1) / largest).unsqueeze(-1)
    minima = torch.where(dmin > 0, wanted_minima / dmin, torch.zeros_like(wanted)).round().clamp(0, largest)
    best_d, best_scales, best_minima = torch.zeros_like(total), torch.zeros_like(wanted), torch.zeros_like(wanted)
    for factor in _SUPER:
        d = half(wanted.amax(-1) / largest * factor).unsqueeze(-1)
        nearest = torch.where(d > 0, wanted / d, torch.zeros_like(wanted)).round()
        chosen: tuple[Tensor, ...] = (torch.full_like(wanted, torch.inf), nearest, minima)
        for step in (0, -1, 1):
            for shift in (0, -1, 1):
                scale, minimum = (nearest + step).clamp(0, largest), (minima + shift).clamp(0, largest)
                codes = codes_for(values, d * scale, dmin * minimum, 0, high)
                chosen = _keep(chosen, (error_of(values, codes, d * scale, dmin * minimum), scale, minimum))
        better = chosen[0].sum(-1) < total
        total = torch.where(better, chosen[0].sum(-1), total)
        best_d = torch.where(better, d.squeeze(-1), best_d)
        best_scales = torch.where(better.unsqueeze(-1), chosen[1], best_scales)
        best_minima = torch.where(better.unsqueeze(-1), chosen[2], best_minima)
    codes = codes_for(values, best_d.unsqueeze(-1) * best_scales, dmin * best_minima, 0, high)
    return best_d, dmin.squeeze(-1), best_scales, best_minima, codes
