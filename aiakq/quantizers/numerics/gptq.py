"""GPTQ (arXiv:2210.17323, algorithm 1) for one weight matrix: columns are rounded one by one with error compensation.

``hessian`` is the second moment of the inputs, and ``hinv`` the upper Cholesky hinv of its inverse, as in the published
code. What differs from that code, and why:

- A group's range is taken from the columns as they are when the group begins. The published code looks at a copy that
  is stale inside a block of 128 columns, so that groups smaller than 128 get ranges of weights that have moved since.
- Besides its whole range a group may get a smaller one, down to half, where that lowers the loss of its columns,
  ``sum of (w - q)^2 / hinv_ii^2``: the terms that algorithm 1 adds up.
- A scale is rounded to the dtype it is stored in before the first error is computed from it.
- The codes are an output of the loop; nothing is rounded a second time.
- When every column has its code, all are gone over again a few times, and each takes the code that is best for what the
  others became: coordinate descent on the same loss, as in QuantEase (arXiv:2309.01885). Its gradient ``H (w - q)`` is
  known from the loop: it is ``R E``, with the loop's errors E and the hinv R of ``H = R R^T``.
- Inputs that were never active keep their rounded weight instead of losing it.
- At most three matrices of K * K floats are alive at a time, the Hessian that is passed in among them; four with a
  drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.quantizers.numerics.cholesky import factors
from aiakq.quantizers.numerics.clip import searched_scales
from aiakq.quantizers.numerics.gptq_block import Grid, move_columns, round_columns
from aiakq.quantizers.numerics.rounding import grouped, ranges, round_weight, scales_for

#: Columns whose updates are collected before the rest of the matrix sees them.
LAZY_COLUMNS = 128
#: Columns whose products with a hinv are worked out at a time.
_AT_ONCE = 512


@dataclass(frozen=True)
class GptqSettings:
    """The parameters of GPTQ.

    storage  the dtype scales are stored in.
    order    none, static or group; see ``column_order``.
    search   whether groups may have less than their whole range, as the published code does not.
    sweeps   how often all columns are gone over again once all have a code; the published code does not.
    """

    bits: int
    group_size: int
    symmetric: bool
    storage: torch.dtype
    order: str = "none"
    damp: float = 0.01
    search: bool = True
    sweeps: int = 0


@dataclass(frozen=True)
class GptqResult:
    """Codes [N, K] uint8, scales and zeros [N, K / G] float32; the damping that was needed, None for RTN."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    damp: float | None


def gptq(
    weight: Tensor | Sequence[Tensor], hessian: Tensor, settings: GptqSettings, drift: Tensor | None = None
) -> GptqResult:
    """Round ``weight``; see GptqSolver."""
    return GptqSolver(hessian, settings, drift).round(weight)


class GptqSolver:
    """Rounds weights so that the error of their outputs, ``tr(D hessian D^T)``, is small.

    hessian [K, K] float32, the second moment of the inputs in any scale; not modified. ``drift`` [K, K], in the same
    scale, is what GPTAQ adds to later columns per unit of weight (gptaq.py) times the Hessian: the mean of
    ``(x' - x) x^T`` where x' are the inputs in the unquantized model. The Hessian is factored once for all weights;
    each row of a weight is rounded as if it were alone.
    """

    def __init__(self, hessian: Tensor, settings: GptqSettings, drift: Tensor | None = None) -> None:
        self.hessian, self.settings, self.drift = hessian, settings, drift
        k = len(hessian)
        self.group_size = k if settings.group_size == -1 else settings.group_size
        self.order = column_order(hessian.diagonal(), self.group_size, settings.order)
        self.moved = None if settings.order == "none" else self.order
        found = factors(hessian, self.moved, settings.damp)
        self.damp = None if found is None else found[2]
        if found is None:
            return
        self.hinv = found[1]
        self.root = found[0] if settings.sweeps and drift is None else None
        del found
        self.shift = None if drift is None else _shift(drift, self.hinv, self.moved)
        # What an error in each column costs, once the columns after it have made up for it.
        self.cost = self.hinv.diagonal().pow(-2)

    def round(self, weight: Tensor | Sequence[Tensor]) -> GptqResult:
        """Round ``weight`` [N, K] float32, or several of equal K that count as one below the other; not modified."""
        settings, size = self.settings, self.group_size
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        if self.damp is None:
            found = round_weight(torch.cat(parts), settings.bits, size, settings.symmetric, settings.storage)
            return GptqResult(*found, damp=None)
        k = parts[0].shape[1]
        # Columns become rows, so that each step works on contiguous memory.
        columns = torch.cat([part.T for part in parts], dim=1)
        if self.moved is not None:
            columns = columns[self.moved]
        n = columns.shape[1]
        if settings.order == "static":
            by_input = self.cost[torch.argsort(self.order)].unflatten(0, (-1, size))
            whole = [_scales_of_groups(grouped(part, size), by_input, settings) for part in parts]
            scales, zeros = (torch.cat(tensors).T.contiguous() for tensors in zip(*whole, strict=True))
            del whole
        else:
            scales, zeros = torch.empty(2, k // size, n, device=columns.device)
        grid = Grid(settings.bits, scales, zeros, torch.empty(k, n, dtype=torch.uint8, device=columns.device))
        _round_in_order(columns, self.hinv, self.shift, self.cost, grid, self.order, size, settings)
        if self.root is not None:
            _to_gradient(columns, self.root)
        if settings.sweeps:
            self._improve(parts, grid, columns)
        del columns
        return GptqResult(grid.codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), self.damp)

    def _improve(self, parts: Sequence[Tensor], grid: Grid, columns: Tensor) -> None:
        """Go over all columns again; ``columns`` [K, N] are the gradient in the order of the loop, without a drift."""
        assert self.damp is not None
        first = 0
        for part in parts:
            rows = slice(first, first + len(part))
            first = rows.stop
            mine = Grid(grid.bits, *(tensor[:, rows] for tensor in grid[1:]))
            gradient = None if self.drift is not None else columns[:, rows]
            if gradient is not None and self.moved is not None:
                gradient = torch.empty(len(columns), len(part), device=gradient.device).index_copy_(
                    0, self.moved, gradient
                )
            _improve(part, mine, gradient, self.hessian, self.drift, self.damp, self.settings.sweeps)


def _round_in_order(
    columns: Tensor,
    hinv: Tensor,
    shift: Tensor | None,
    cost: Tensor,
    grid: Grid,
    order: Tensor,
    size: int,
    settings: GptqSettings,
) -> None:
    """The loop: columns [K, N], in ``order``, become their errors; codes and the ranges of groups go into ``grid``."""
    k = len(columns)
    group_of, places = (order // size).tolist(), order.tolist()
    step = _lazy_columns(size, k)
    for start in range(0, k, step):
        stop = min(start + step, k)
        before = None if shift is None else torch.empty_like(columns[start:stop])
        first = start
        while first < stop:
            last = stop
            if settings.order != "static":
                # Up to the next column that begins a group.
                last = min(stop, (first // size + 1) * size)
                if first % size == 0:
                    ahead = slice(first, first + size)
                    found = _scales_of_groups(columns[ahead].T, cost[ahead], settings)
                    grid.scales[group_of[first]], grid.zeros[group_of[first]] = found
            here = slice(first, stop)
            drift = None if shift is None else shift[here, here]
            mine = None if before is None else before[first - start :]
            round_columns(columns[here], hinv[here, here], grid, group_of[first:last], places[first:last], drift, mine)
            first = last
        columns[stop:].addmm_(hinv[start:stop, stop:].T, columns[start:stop], alpha=-1)
        if before is not None and shift is not None:
            columns[stop:].addmm_(shift[start:stop, stop:].T, before)


def _to_gradient(errors: Tensor, root: Tensor) -> None:
    """Turn errors [K, N] into ``root errors``, in place; root [K, K] is upper triangular, so this goes from above."""
    for start in range(0, len(errors), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        errors[rows] = root[rows, start:] @ errors[start:]


def _improve(
    weight: Tensor, grid: Grid, gradient: Tensor | None, hessian: Tensor, drift: Tensor | None, damp: float, sweeps: int
) -> None:
    """Go over all columns again, each time taking the code that is best while the others stay.

    Coordinate descent on the loss that the loop minimizes, from where it ended, so that no step makes it larger. With q
    what the codes stand for, the gradient of the loss by ``w - q`` is ``H (w - q)``, plus ``drift^T w`` with a drift.
    It is updated in blocks. weight [N, K]; gradient [K, N] is modified, and computed if it is None.
    """
    k, size = weight.shape[1], weight.shape[1] // len(grid.scales)
    mean = hessian.diagonal().mean() * damp
    values = torch.empty(k, len(weight), device=weight.device)
    for group, (scale, zero) in enumerate(zip(grid.scales, grid.zeros, strict=True)):
        rows = slice(group * size, (group + 1) * size)
        values[rows] = (grid.codes[rows] - zero) * scale
    if gradient is None:
        gap = weight.T - values
        gradient = (hessian @ gap).add_(gap.mul_(mean))
        del gap
        if drift is not None:
            gradient.addmm_(drift.T, weight.T)
    steps = torch.where(hessian.diagonal() > 0, 1 / (hessian.diagonal() + mean), 0.0).tolist()
    for sweep in range(sweeps):
        for start in range(0, k, LAZY_COLUMNS):
            here = slice(start, min(start + LAZY_COLUMNS, k))
            places = range(k)[here]
            moves = gradient[here].clone()
            groups = [column // size for column in places]
            move_columns(moves, hessian[here, here], grid, groups, places, values[here], steps[here])
            # The last time, nobody comes back to the columns before.
            heard = slice(here.stop if sweep == sweeps - 1 else 0, k)
            gradient[heard].addmm_(hessian[heard, here], moves, alpha=-1)
            gradient[here].sub_(moves.mul_(mean))


def _scales_of_groups(groups: Tensor, cost: Tensor, settings: GptqSettings) -> tuple[Tensor, Tensor]:
    """Scales and zero points [...] of groups [..., G]; ``cost`` [..., G] weighs the squared error of each column."""
    if settings.search:
        return searched_scales(groups, settings.bits, settings.symmetric, settings.storage, cost)
    return scales_for(*ranges(groups, settings.symmetric), settings.bits, settings.symmetric, settings.storage)


def _shift(drift: Tensor, hinv: Tensor, order: Tensor | None) -> Tensor:
    """What a weight in column i adds to the columns after it, ``triu(drift U^T, 1) U`` [K, K] (arXiv:2504.02692)."""
    if order is not None:
        drift = drift[order][:, order]
    return (drift @ hinv.T).triu_(1) @ hinv


def _lazy_columns(group_size: int, k: int) -> int:
    """Columns per lazy block, such that a group never begins inside a block that later columns have not heard of."""
    if group_size >= k:
        return LAZY_COLUMNS
    if group_size <= LAZY_COLUMNS:
        return LAZY_COLUMNS // group_size * group_size
    return next(step for step in range(LAZY_COLUMNS, 0, -1) if group_size % step == 0)


def column_order(importance: Tensor, group_size: int, order: str) -> Tensor:
    """The order [K] in which columns are rounded.

    ``static`` is by importance, whatever the group. ``group`` (arXiv:2505.14638) keeps groups together: groups by their
    most important column, columns by importance inside. Ties keep the natural order.
    """
    k = len(importance)
    if order == "none":
        return torch.arange(k, device=importance.device)
    if order == "static":
        return torch.argsort(importance, descending=True, stable=True)
    groups = importance.unflatten(0, (-1, group_size))
    inside = torch.argsort(groups, dim=1, descending=True, stable=True)
    outside = torch.argsort(groups.amax(1), descending=True, stable=True)
    first = torch.arange(0, k, group_size, device=importance.device).unsqueeze(1)
    return (first + inside)[outside].flatten()
