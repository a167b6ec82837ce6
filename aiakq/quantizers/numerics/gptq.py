"""GPTQ (arXiv:2210.17323, algorithm 1) for one weight matrix: columns are rounded one by one with error compensation.

``hessian`` is the second moment of the inputs, and ``hinv`` the upper Cholesky factor of its inverse, as in the
published code. Differences from that code, and their reasons:

- A group's range is computed from the columns at the time the group begins. The published code uses a copy that is
  stale inside a block of 128 columns, so that groups smaller than 128 get ranges of outdated weights.
- Besides its full range a group may get a smaller one, down to half, if that lowers the loss of its columns,
  ``sum of (w - q)^2 / hinv_ii^2``: the terms that algorithm 1 sums.
- A scale is rounded to its storage dtype before the first error is computed with it.
- The codes are an output of the loop; nothing is rounded a second time.
- After every column has its code, a few sweeps revisit all columns, and each takes the code that is best given the
  others: coordinate descent on the same loss, as in QuantEase (arXiv:2309.01885). Its gradient ``H (w - q)`` is known
  from the loop: it is ``R E``, with the loop's errors E and the Cholesky factor R of ``H = R R^T``.
- Inputs that were never active keep their rounded weights instead of zeros.
- At most three matrices of K * K floats are alive at a time, including the Hessian that is passed in; four with a
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

#: Columns whose updates are accumulated before they are applied to the rest of the matrix.
LAZY_COLUMNS = 128
#: Columns whose products with ``hinv`` are computed at a time.
_AT_ONCE = 512


@dataclass(frozen=True)
class GptqSettings:
    """The parameters of GPTQ.

    storage  the dtype in which scales are stored.
    order    none, static or group; see ``column_order``.
    search   whether groups may get less than their full range, unlike in the published code.
    sweeps   number of sweeps over all columns after the loop; 0 in the published code.
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
    """Codes [N, K] uint8, scales and zeros [N, K / G] float32; the damping used, None for RTN."""

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
    """Rounds weights so that their output error, ``tr(D hessian D^T)``, is small.

    hessian [K, K] float32, the second moment of the inputs up to a factor; not modified. ``drift`` [K, K], with the
    same factor, is what GPTAQ adds to later columns per unit of weight (gptaq.py) times the Hessian: the mean of
    ``(x' - x) x^T`` where x' are the inputs in the unquantized model. The Hessian is factored once for all weights;
    each row of a weight is rounded independently.
    """

    def __init__(self, hessian: Tensor, settings: GptqSettings, drift: Tensor | None = None) -> None:
        self.hessian, self.settings, self.drift = hessian, settings, drift
        k = len(hessian)
        self.group_size = k if settings.group_size == -1 else settings.group_size
        self.order = column_order(hessian.diagonal(), self.group_size, settings.order)
        self.moved = None if settings.order == "none" else self.order
        solution = factors(hessian, self.moved, settings.damp)
        self.damp = None if solution is None else solution[2]
        if solution is None:
            return
        self.hinv = solution[1]
        self.root = solution[0] if settings.sweeps and drift is None else None
        del solution
        self.shift = None if drift is None else _shift(drift, self.hinv, self.moved)
        # The cost of an error in each column after compensation in the columns that follow.
        self.cost = self.hinv.diagonal().pow(-2)

    def round(self, weight: Tensor | Sequence[Tensor]) -> GptqResult:
        """Round ``weight`` [N, K] float32, or several of equal K as if they were concatenated along N; not modified."""
        settings, size = self.settings, self.group_size
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        if self.damp is None:
            rounded = round_weight(torch.cat(parts), settings.bits, size, settings.symmetric, settings.storage)
            return GptqResult(*rounded, damp=None)
        k = parts[0].shape[1]
        # Transpose, so that each step works on contiguous memory.
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
        """Run the sweeps; ``columns`` [K, N] are the gradient in the order of the loop, without a drift."""
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
    """The loop: replace columns [K, N], in ``order``, by their errors, and write codes and ranges to ``grid``."""
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
                    scales_and_zeros = _scales_of_groups(columns[ahead].T, cost[ahead], settings)
                    grid.scales[group_of[first]], grid.zeros[group_of[first]] = scales_and_zeros
            block = slice(first, stop)
            drift = None if shift is None else shift[block, block]
            mine = None if before is None else before[first - start :]
            round_columns(
                columns[block], hinv[block, block], grid, group_of[first:last], places[first:last], drift, mine
            )
            first = last
        columns[stop:].addmm_(hinv[start:stop, stop:].T, columns[start:stop], alpha=-1)
        if before is not None and shift is not None:
            columns[stop:].addmm_(shift[start:stop, stop:].T, before)


def _to_gradient(errors: Tensor, root: Tensor) -> None:
    """Replace errors [K, N] by ``root errors`` in place; root [K, K] is upper triangular, so rows go from the top."""
    for start in range(0, len(errors), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        errors[rows] = root[rows, start:] @ errors[start:]


def _improve(
    weight: Tensor, grid: Grid, gradient: Tensor | None, hessian: Tensor, drift: Tensor | None, damp: float, sweeps: int
) -> None:
    """Sweep over all columns again, each time choosing the best code while the others stay.

    Coordinate descent on the loss that the loop minimizes, starting from its result, so that no step increases it. With
    the dequantized weights q, the gradient of the loss with respect to ``w - q`` is ``H (w - q)``, plus ``drift^T w``
    with a drift. It is updated in blocks. weight [N, K]; gradient [K, N] is modified, and computed if it is None.
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
            block = slice(start, min(start + LAZY_COLUMNS, k))
            places = range(k)[block]
            moves = gradient[block].clone()
            groups = [column // size for column in places]
            move_columns(moves, hessian[block, block], grid, groups, places, values[block], steps[block])
            # In the last sweep, earlier columns are not visited again.
            updated = slice(block.stop if sweep == sweeps - 1 else 0, k)
            gradient[updated].addmm_(hessian[updated, block], moves, alpha=-1)
            gradient[block].sub_(moves.mul_(mean))


def _scales_of_groups(groups: Tensor, cost: Tensor, settings: GptqSettings) -> tuple[Tensor, Tensor]:
    """Return scales and zero points [...] of groups [..., G]; ``cost`` [..., G] weights the squared column errors."""
    if settings.search:
        return searched_scales(groups, settings.bits, settings.symmetric, settings.storage, cost)
    return scales_for(*ranges(groups, settings.symmetric), settings.bits, settings.symmetric, settings.storage)


def _shift(drift: Tensor, hinv: Tensor, order: Tensor | None) -> Tensor:
    """Return what a weight in column i adds to later columns, ``triu(drift U^T, 1) U`` [K, K] (arXiv:2504.02692)."""
    if order is not None:
        drift = drift[order][:, order]
    return (drift @ hinv.T).triu_(1) @ hinv


def _lazy_columns(group_size: int, k: int) -> int:
    """Return columns per lazy block such that no group begins where pending updates have not been applied."""
    if group_size >= k:
        return LAZY_COLUMNS
    if group_size <= LAZY_COLUMNS:
        return LAZY_COLUMNS // group_size * group_size
    return next(step for step in range(LAZY_COLUMNS, 0, -1) if group_size % step == 0)


def column_order(importance: Tensor, group_size: int, order: str) -> Tensor:
    """Return the order [K] in which columns are rounded.

    ``static`` sorts columns by importance, regardless of groups. ``group`` (arXiv:2505.14638) keeps groups together:
    groups by their most important column, columns by importance inside. Ties keep the natural order.
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
