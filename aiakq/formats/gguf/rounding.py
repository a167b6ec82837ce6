"""Rounding of floats to codes with scales: searches for the smallest squared error, over many groups at once.

Groups are columns: values are [G, B], so that sums over a group add whole rows. A scale is searched over a grid. For
the codes q of each candidate the best scale and minimum are those of least squares, and the error follows from the sums
of q, q q and x q alone, without decoding anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Candidates of a scale, as factors of that which covers the largest value.
_SYMMETRIC = (0.78, 0.82, 0.86, 0.9, 0.93, 0.96, 0.99, 1.02, 1.06)
_AFFINE = (0.64, 0.69, 0.74, 0.78, 0.82, 0.86, 0.9, 0.93, 0.96, 0.99, 1.02, 1.05)
#: Those for 8 bits, where clipping costs more than it gains.
_FINE = (0.98, 0.99, 1.0)
#: Rounds of codes and least squares after the search.
_ROUNDS = 2
_TINY = 1e-30


@dataclass(frozen=True)
class CodeLevels:
    """The numbers that codes stand for: the integers from ``low`` to ``high``, or those of a table.

    table  ascending values, the first is ``low`` and the last ``high``; None: all integers.
    """

    low: int
    high: int
    table: Tensor | None = None

    @classmethod
    def of_table(cls, values: Sequence[float]) -> CodeLevels:
        return cls(int(values[0]), int(values[-1]), torch.tensor(values, dtype=torch.float32))

    def nearest_(self, values: Tensor) -> Tensor:
        """Replace values by the nearest numbers."""
        if self.table is None:
            return values.round_().clamp_(self.low, self.high)
        return values.copy_(self.table[self.indices(values)])

    def indices(self, values: Tensor) -> Tensor:
        """Return the indices in the table of the numbers nearest to values."""
        assert self.table is not None
        return torch.bucketize(values, (self.table[1:] + self.table[:-1]) / 2, out_int32=True)


@dataclass
class Groups:
    """Groups of values that share a scale, with the weights of their squared errors.

    values   [G, B] float32.
    weights  [G, B] float32, or None for equal ones.
    """

    values: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        x = self.values
        weighted = x if self.weights is None else x * self.weights
        self.sum_w = torch.full_like(x[0], len(x)) if self.weights is None else self.weights.sum(0)
        self.sum_x, self.sum_xx = weighted.sum(0), (weighted * x).sum(0)
        self._weighted = weighted
        self._scratch = torch.empty_like(x)

    def codes(self, scales: Tensor, minima: Tensor | None, levels: CodeLevels, out: Tensor | None = None) -> Tensor:
        """Return the nearest codes [G, B] for x = code * scale - minimum, as floats: that of 0 for scale 0."""
        inverse = torch.where(scales.abs() > _TINY, 1 / scales, torch.zeros_like(scales))
        if minima is None:
            result = torch.mul(self.values, inverse, out=out)
        else:
            result = torch.addcmul(minima * inverse, self.values, inverse, out=out)
        return levels.nearest_(result)

    def sums(self, codes: Tensor) -> Sums:
        """Return the sums [B] of codes [G, B], by which errors and least squares are computed."""
        scratch = torch.mul(codes, self._weighted, out=self._scratch)
        xq = scratch.sum(0)
        if self.weights is None:
            return Sums(codes.sum(0), torch.mul(codes, codes, out=scratch).sum(0), xq)
        q = torch.mul(codes, self.weights, out=scratch).sum(0)
        return Sums(q, scratch.mul_(codes).sum(0), xq)

    def error(self, sums: Sums, scales: Tensor, minima: Tensor | None = None) -> Tensor:
        """Return the squared error [B] of codes with these sums, for scales and minima [B]."""
        found = self.sum_xx + scales * (scales * sums.qq - 2 * sums.xq)
        if minima is not None:
            found = found + minima * (minima * self.sum_w + 2 * (self.sum_x - scales * sums.q))
        return found

    def least_squares(self, sums: Sums, nonnegative: bool) -> tuple[Tensor, Tensor]:
        """Return the best scales and minima [B] for codes with these sums; scales are not negative."""
        determinant = self.sum_w * sums.qq - sums.q.square()
        solvable = determinant > 1e-6 * self.sum_w * sums.qq
        safe = torch.where(solvable, determinant, torch.ones_like(determinant))
        scales = (self.sum_w * sums.xq - sums.q * self.sum_x) / safe
        scales = torch.where(solvable, scales, torch.zeros_like(scales)).clamp_min_(0)
        minima = (scales * sums.q - self.sum_x) / self.sum_w.clamp_min(_TINY)
        if nonnegative:
            alone = (sums.xq / sums.qq.clamp_min(_TINY)).clamp_min_(0)
            scales, minima = torch.where(minima < 0, alone, scales), minima.clamp_min_(0)
        return scales, minima


@dataclass
class Sums:
    """Sums over groups [B]: of codes, of their squares, and of their products with values, all of them weighted."""

    q: Tensor
    qq: Tensor
    xq: Tensor


def _keep(best: list[Tensor], found: list[Tensor]) -> list[Tensor]:
    """Return, for every group, the values whose first, the error, is smaller."""
    better = found[0] < best[0]
    return [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]


def symmetric_scales(groups: Groups, levels: CodeLevels) -> Tensor:
    """Return the scales [B], of either sign, for codes that are ``levels``."""
    x = groups.values
    peak = x.gather(0, x.abs().argmax(0, keepdim=True)).squeeze(0)
    codes = torch.empty_like(x)
    best = [torch.full_like(peak, torch.inf), torch.zeros_like(peak)]

    def tried(scales: Tensor) -> list[Tensor]:
        sums = groups.sums(groups.codes(scales, None, levels, codes))
        scales = sums.xq / sums.qq.clamp_min(_TINY)
        return [groups.error(sums, scales), scales]

    uneven = levels.table is not None
    for factor in _SYMMETRIC if levels.high < 64 or uneven else _FINE:
        for end in (levels.low, levels.high) if levels.high < 16 or uneven else (levels.low,):
            best = _keep(best, tried(peak / end * factor))
    for _ in range(_ROUNDS):
        best = _keep(best, tried(best[1]))
    return best[1]


def affine_scales(groups: Groups, high: int, nonnegative: bool) -> tuple[Tensor, Tensor]:
    """Return scales and minima [B] for x = code * scale - minimum, with codes from 0 to ``high``.

    nonnegative  whether minima must not be negative, as those of K kinds.
    """
    x = groups.values
    low, top = x.amin(0), x.amax(0)
    if nonnegative:
        low = low.clamp_max(0)
    width = (top - low).clamp_min(0)
    codes, levels = torch.empty_like(x), CodeLevels(0, high)
    best = [torch.full_like(low, torch.inf), torch.zeros_like(low), torch.zeros_like(low)]

    def tried(scales: Tensor, minima: Tensor) -> list[Tensor]:
        sums = groups.sums(groups.codes(scales, minima, levels, codes))
        scales, minima = groups.least_squares(sums, nonnegative)
        return [groups.error(sums, scales, minima), scales, minima]

    for factor in _AFFINE:
        # What is cut off is cut at both ends.
        minima = -(low + width * max(0.0, (1 - factor) / 2)) if not nonnegative else -low * min(factor + 0.05, 1.0)
        best = _keep(best, tried(width / high * factor, minima))
    for _ in range(_ROUNDS):
        best = _keep(best, tried(best[1], best[2]))
    return best[1], best[2]


def half(values: Tensor) -> Tensor:
    """Return values rounded to float16, in float32."""
    return values.clamp(-65504, 65504).half().float()


def _ratio(values: Tensor, scale: Tensor) -> Tensor:
    """Return values [B, S] in units of scale [B, 1], 0 where that is 0."""
    return torch.where(scale != 0, values / scale, torch.zeros_like(values)).round_()


def super_symmetric(groups: Groups, s: int, levels: CodeLevels, integers: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return d [B], integers [B, S] and codes [G, B * S] for x = code * (d * integer), from groups [G, B * S].

    s         groups of a block.
    levels    that codes are.
    integers  the smallest and largest integer.
    """
    wanted = symmetric_scales(groups, levels).view(-1, s)
    peak = wanted.gather(-1, wanted.abs().argmax(-1, keepdim=True))
    best = [torch.full_like(peak, torch.inf), torch.zeros_like(peak), torch.zeros_like(wanted)]
    codes = torch.empty_like(groups.values)
    d = half(peak / integers[0])
    nearest = _ratio(wanted, d).clamp_(*integers)
    for _ in range(_ROUNDS):
        sums = groups.sums(groups.codes((d * nearest).flatten(), None, levels, codes))
        error = groups.error(sums, (d * nearest).flatten()).view(-1, s).sum(-1, keepdim=True)
        best = _keep(best, [error, d, nearest])
        xq, qq = sums.xq.view(-1, s), sums.qq.view(-1, s)
        nearest = _ratio(xq / qq.clamp_min(_TINY), d).clamp_(*integers)
        d = half((nearest * xq).sum(-1, keepdim=True) / (nearest.square() * qq).sum(-1, keepdim=True).clamp_min(_TINY))
    scales = (best[1] * best[2]).flatten()
    return best[1].squeeze(-1), best[2], groups.codes(scales, None, levels, codes)


def super_affine(groups: Groups, s: int, high: int, largest: int) -> tuple[Tensor, ...]:
    """Return d [B], dmin [B], scales [B, S], minima [B, S] and codes [G, B * S] for
    x = code * (d * scale) - dmin * minimum, from groups [G, B * S].

    s        groups of a block.
    largest  of the integers that scales and minima are.
    """
    found, found_minima = affine_scales(groups, high, nonnegative=True)
    wanted, wanted_minima = found.view(-1, s), found_minima.view(-1, s)
    zero = torch.zeros_like(wanted)
    one = zero[:, :1]
    best = [torch.full_like(one, torch.inf), one, one, zero, zero]
    codes, levels = torch.empty_like(groups.values), CodeLevels(0, high)
    d = half(wanted.amax(-1, keepdim=True) / largest)
    dmin = half(wanted_minima.amax(-1, keepdim=True) / largest)
    scales, minima = _ratio(wanted, d).clamp_(0, largest), _ratio(wanted_minima, dmin).clamp_(0, largest)
    for _ in range(_ROUNDS):
        given = (d * scales).flatten(), (dmin * minima).flatten()
        sums = groups.sums(groups.codes(*given, levels, codes))
        error = groups.error(sums, *given).view(-1, s).sum(-1, keepdim=True)
        best = _keep(best, [error, d, dmin, scales, minima])
        scales, minima = _nearby(groups, sums, d, dmin, scales, minima, largest)
        d, dmin = _super_least_squares(groups, sums, scales, minima, d, dmin)
    given = (best[1] * best[3]).flatten(), (best[2] * best[4]).flatten()
    return best[1].squeeze(-1), best[2].squeeze(-1), best[3], best[4], groups.codes(*given, levels, codes)


def _nearby(
    groups: Groups, sums: Sums, d: Tensor, dmin: Tensor, scales: Tensor, minima: Tensor, largest: int
) -> tuple[Tensor, Tensor]:
    """Return the integers [B, S], at most 1 from those given, with the smallest error for codes that stay."""
    best = [torch.full_like(scales, torch.inf), scales, minima]
    for step in (0, -1, 1):
        for shift in (0, -1, 1):
            scale, minimum = (scales + step).clamp_(0, largest), (minima + shift).clamp_(0, largest)
            error = groups.error(sums, (d * scale).flatten(), (dmin * minimum).flatten()).view_as(scales)
            best = _keep(best, [error, scale, minimum])
    return best[1], best[2]


def _super_least_squares(
    groups: Groups, sums: Sums, scales: Tensor, minima: Tensor, d: Tensor, dmin: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the best d and dmin [B, 1] for integers [B, S] and codes with these sums, rounded to float16."""
    q, qq, xq = (each.view_as(scales) for each in (sums.q, sums.qq, sums.xq))
    x, w = groups.sum_x.view_as(scales), groups.sum_w.view_as(scales)
    dd = (scales.square() * qq).sum(-1, keepdim=True)
    mm = (minima.square() * w).sum(-1, keepdim=True)
    dm = (scales * minima * q).sum(-1, keepdim=True)
    dx, mx = (scales * xq).sum(-1, keepdim=True), (minima * x).sum(-1, keepdim=True)
    determinant = dd * mm - dm.square()
    solvable = determinant > 1e-6 * dd * mm
    safe = torch.where(solvable, determinant, torch.ones_like(determinant))
    new_d, new_min = (dx * mm - mx * dm) / safe, (dx * dm - mx * dd) / safe
    fine = solvable & (new_d > 0) & (new_min > 0)
    return torch.where(fine, half(new_d), d), torch.where(fine, half(new_min), dmin)
