"""GPTQ (arXiv:2210.17323, algorithm 1) for one weight matrix: columns are rounded one by one with error compensation.

``hessian`` is the second moment of the inputs, and ``hinv`` the upper Cholesky factor of its inverse, as in the
published code. Differences from that code, and their reasons:

- A group's range is computed from the columns at the time the group begins. The published code uses a copy that is
  stale inside a block of 128 columns, so that groups smaller than 128 get ranges of outdated weights.
- Besides its full range a group may get a smaller one, down to half, or a negative scale, if that lowers the loss of
  its columns, ``sum of (w - q)^2 / hinv_ii^2``: the terms that algorithm 1 sums.
- A scale is rounded to its storage dtype before the first error is computed with it.
- The codes are an output of the loop; nothing is rounded a second time.
- After every column has its code, a few sweeps revisit all columns and scales (sweeps.py). The gradient
  ``H (w - q)`` that they need is known from the loop: it is ``R E``, with the loop's errors E and the Cholesky factor R
  of ``H = R R^T``.
- Inputs that were never active keep their rounded weights instead of zeros.
- With a shift S [N, K] the outputs shall not be those of W but of W plus what S says about the original model
  (rounders/targets.py): the loss is ``tr(Q H Q^T - 2 Q (W H + S)^T)``, which is that of GPTQ for the target
  ``W* = W + S H^-1 = W + Y U`` with ``Y = S U^T``, as ``H^-1 = U^T U``. Y is one product with a triangle. The other one
  costs nothing: the loop subtracts ``E U`` from the columns that follow, and now subtracts ``(E - Y) U``.
- At most three matrices of K * K floats are alive at a time, with the Hessian that is passed in; five with a drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.quantizers.numerics.cholesky import factors
from aiakq.quantizers.numerics.code_grid import CodeGrid
from aiakq.quantizers.numerics.gptq_block import Grid, round_columns
from aiakq.quantizers.numerics.sweeps import LAZY_COLUMNS, Descent
from aiakq.rounding.integers import grouped

#: Columns whose products with a triangular matrix are computed at a time.
_AT_ONCE = 512


@dataclass(frozen=True)
class GptqSettings:
    """The parameters of GPTQ.

    grid    the grid of codes.
    order   none, static or group; see ``column_order``.
    sweeps  number of sweeps over all columns after the loop; 0 in the published code.
    refit   whether the sweeps, and a last step, also refit the scales to the codes.
    scales_per_group  scales of a group, which are searched together (``BlockGrid``).
    """

    grid: CodeGrid
    group_size: int
    order: str = "none"
    damp: float = 0.01
    sweeps: int = 0
    refit: bool = False
    scales_per_group: int = 1


@dataclass(frozen=True)
class GptqResult:
    """Codes [N, K] uint8, scales and zeros [N, K / G] float32; the damping used, None for RTN."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    damp: float | None


class GptqSolver:
    """Rounds weights so that their output error, ``tr(D hessian D^T)``, is small.

    hessian [K, K] float32, the second moment of the inputs up to a factor; not modified. ``drift`` [K, K], with the
    same factor, is a shift per unit of weight: weights W get the shift ``W drift``. The Hessian is factored once for
    all weights; each row of a weight is rounded independently.
    """

    def __init__(self, hessian: Tensor, settings: GptqSettings, drift: Tensor | None = None) -> None:
        self.hessian, self.settings = hessian, settings
        k = len(hessian)
        self.group_size = k if settings.group_size == -1 else settings.group_size
        self.order = column_order(hessian.diagonal(), self.group_size, settings.order)
        self.moved = None if settings.order == "none" else self.order
        solution = factors(hessian, self.moved, settings.damp)
        self.damp = None if solution is None else solution[2]
        if solution is None:
            return
        self.hinv = solution[1]
        self.root = solution[0] if settings.sweeps or settings.refit else None
        del solution
        self.drift = None
        if drift is not None:
            self.drift = drift.T.contiguous() if self.moved is None else drift.T[self.moved]
            _multiply_upper(self.hinv, self.drift)
        # The cost of an error in each column after compensation in the columns that follow.
        self.cost = self.hinv.diagonal().pow(-2)

    def round(
        self,
        weight: Tensor | Sequence[Tensor],
        shift: Tensor | None = None,
        fixed: Tensor | None = None,
        drifts: bool = True,
    ) -> GptqResult:
        """Round ``weight`` [N, K] float32, or several of equal K as if they were concatenated along N; not modified.

        ``shift`` [N, K] is added to that of the drift, which is left out if not ``drifts``. ``fixed`` [N, K / G]
        float32 are scales that may not be chosen; then none is refitted.
        """
        settings, size = self.settings, self.group_size
        assert fixed is None or not settings.refit, "fixed scales are not refitted"
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        if self.damp is None:
            return self._rounded_to_nearest(torch.cat(parts), fixed)
        k = parts[0].shape[1]
        # Transpose, so that each step works on contiguous memory.
        columns = torch.cat([part.T for part in parts], dim=1)
        pending = self._pending(columns, shift) if drifts else None
        if self.moved is not None:
            columns = columns[self.moved]
        n = columns.shape[1]
        if pending is not None and (settings.order == "static" or size > LAZY_COLUMNS):
            # The ranges need all of the target at once.
            _add_transposed_upper(self.hinv, pending, columns)
            if settings.order == "static":
                parts = [columns[torch.argsort(self.order)].T]
            pending = None
        if fixed is not None:
            scales, zeros = fixed.T.contiguous(), torch.zeros_like(fixed.T)
        elif settings.order == "static":
            by_input = self.cost[torch.argsort(self.order)].unflatten(0, (-1, size))
            whole = [settings.grid.search(grouped(part, size), by_input) for part in parts]
            scales, zeros = (torch.cat(tensors).T.contiguous() for tensors in zip(*whole, strict=True))
            del whole
        else:
            count = k // size * settings.scales_per_group
            scales, zeros = torch.empty(2, count, n, device=columns.device)
        grid = Grid(settings.grid, scales, zeros, torch.empty(k, n, dtype=torch.uint8, device=columns.device))
        self._round_in_order(columns, pending, grid, searches=settings.order != "static" and fixed is None)
        del pending
        if self.root is not None:
            _multiply_upper(self.root, columns)
            # On a GPU, a launch for all rows takes little longer than one for some.
            self._improve([len(part) for part in parts] if columns.device.type == "cpu" else [n], grid, columns)
        del columns
        return GptqResult(grid.codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), self.damp)

    def target(self, weight: Tensor, shift: Tensor | None) -> Tensor:
        """Return the weights [N, K] that ``round`` steers towards, a new tensor: ``W* = W + S H^-1``."""
        columns = weight.T.contiguous()
        pending = self._pending(columns, shift)
        if pending is None:
            return weight.clone()
        moves = torch.zeros_like(columns)
        _add_transposed_upper(self.hinv, pending, moves)
        return columns.index_add_(0, self.order, moves).T.contiguous()

    def values(self, result: GptqResult) -> Tensor:
        """Return the dequantized weights [N, K] of a result."""
        n, size = len(result.codes), self.group_size
        groups = result.codes.float().view(n, -1, size).movedim(2, 0)
        values = self.settings.grid.units(groups, result.zeros).mul_(result.scales)
        return values.movedim(0, 2).reshape(n, -1)

    def _rounded_to_nearest(self, weight: Tensor, fixed: Tensor | None) -> GptqResult:
        """Round without a Hessian: weight [N, K]; ``fixed`` as in ``round``."""
        groups, kind = grouped(weight, self.group_size), self.settings.grid
        scales, zeros = kind.search(groups, None) if fixed is None else (fixed, torch.zeros_like(fixed))
        codes = kind.codes(groups, scales.unsqueeze(-1), zeros.unsqueeze(-1))
        return GptqResult(codes.flatten(1).to(torch.uint8), scales, zeros, damp=None)

    def _pending(self, columns: Tensor, shift: Tensor | None) -> Tensor | None:
        """Return ``U S^T`` [K, N] in the order of the loop, for weights ``columns`` [K, N] in natural order."""
        if shift is None:
            return None if self.drift is None else self.drift @ columns
        pending = shift.T.contiguous() if self.moved is None else shift.T[self.moved]
        _multiply_upper(self.hinv, pending)
        return pending if self.drift is None else pending.addmm_(self.drift, columns)

    def _round_in_order(self, columns: Tensor, pending: Tensor | None, grid: Grid, searches: bool) -> None:
        """The loop: replace columns [K, N], in its order, by their errors, and write codes to ``grid``; ranges, too, if
        it ``searches`` them when it reaches their groups.

        ``pending`` [K, N]: what remains to be added to the columns is ``U^T pending``.
        """
        k, size, hinv = len(columns), self.group_size, self.hinv
        group_of = (self.order // (size // self.settings.scales_per_group)).tolist()
        places = self.order.tolist()
        step = _lazy_columns(size, k)
        for start in range(0, k, step):
            stop = min(start + step, k)
            if pending is not None:
                columns[start:stop].addmm_(hinv[start:stop, start:stop].T, pending[start:stop])
            first = start
            while first < stop:
                last = stop
                if searches:
                    # Up to the next column that begins a group.
                    last = min(stop, (first // size + 1) * size)
                    if first % size == 0:
                        self._search(columns, grid, slice(first, first + size))
                block = slice(first, stop)
                round_columns(columns[block], hinv[block, block], grid, group_of[first:last], places[first:last])
                first = last
            moved = columns[start:stop] if pending is None else columns[start:stop] - pending[start:stop]
            columns[stop:].addmm_(hinv[start:stop, stop:].T, moved, alpha=-1)

    def _search(self, columns: Tensor, grid: Grid, ahead: slice) -> None:
        """Write the scales and zeros of the group whose columns [K, N] come next."""
        count = self.settings.scales_per_group
        if count == 1:
            group = int(self.order[ahead.start]) // self.group_size
            grid.scales[group], grid.zeros[group] = grid.kind.search(columns[ahead].T, self.cost[ahead])
            return
        # Which scale a column has depends on its place in the group.
        natural = torch.argsort(self.order[ahead])
        scales, zeros = grid.kind.search(columns[ahead][natural].T, self.cost[ahead][natural])
        first = int(self.order[ahead].min()) // self.group_size * count
        grid.scales[first : first + count], grid.zeros[first : first + count] = scales.T, zeros.T

    def _improve(self, lengths: Sequence[int], grid: Grid, columns: Tensor) -> None:
        """Run the sweeps; ``columns`` [K, N] are the gradient in the order of the loop, ``lengths`` sum to N."""
        assert self.damp is not None
        settings, first = self.settings, 0
        damping = self.hessian.diagonal().mean() * self.damp
        for length in lengths:
            rows = slice(first, first + length)
            first = rows.stop
            gradient = columns[:, rows]
            if self.moved is not None:
                gradient = torch.empty(len(columns), length, device=columns.device).index_copy_(0, self.moved, gradient)
            descent = Descent(grid.rows(rows), gradient, self.hessian, damping)
            for sweep in range(settings.sweeps):
                descent.sweep(settings.refit, last=sweep == settings.sweeps - 1 and not settings.refit)
            if settings.refit:
                descent.refit_scales()


def gptq(
    weight: Tensor | Sequence[Tensor],
    hessian: Tensor,
    settings: GptqSettings,
    drift: Tensor | None = None,
    shift: Tensor | None = None,
) -> GptqResult:
    """Round ``weight``; see GptqSolver."""
    return GptqSolver(hessian, settings, drift).round(weight, shift)


def _multiply_upper(upper: Tensor, columns: Tensor) -> None:
    """Replace columns [K, N] by ``upper columns`` in place; upper [K, K] is triangular, so rows go from the top."""
    for start in range(0, len(columns), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        columns[rows] = upper[rows, start:] @ columns[start:]


def _add_transposed_upper(upper: Tensor, x: Tensor, columns: Tensor) -> None:
    """Add ``upper^T x`` to ``columns``; x and columns [K, N], upper [K, K] triangular."""
    for start in range(0, len(columns), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(columns))
        columns[start:stop].addmm_(upper[:stop, start:stop].T, x[:stop])


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
