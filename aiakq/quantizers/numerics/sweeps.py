"""Improves rounded weights: sweeps over the codes, and scales refitted to the codes.

Both lower ``tr(D H D^T)`` of the error ``D = w - q``, step by step, and keep its gradient ``H (w - q)`` up to date. A
sweep gives each column its best code while the others stay: coordinate descent, as in QuantEase (arXiv:2309.01885).
For given codes the loss is quadratic in the scales. Before a sweep visits the codes of a group, it moves the group's
scale to the minimum; at the end ``refit_scales`` solves for all scales of a row together (as in arXiv:2602.02126, where
it is done group by group). Scales are rounded to what can be stored, and kept if that does not lower the loss.

Tensors are transposed, [K, N]: a row is a column of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.quantizers.numerics.cholesky import one_thread
from aiakq.quantizers.numerics.gptq_block import Grid, move_columns

#: Columns whose updates are accumulated before they are applied to the rest of the matrix.
LAZY_COLUMNS = 128
#: Smallest magnitude of a refitted scale, and the ridge of the system, as a fraction of its mean diagonal.
_SMALLEST, _RIDGE = 1e-7, 1e-6
#: Bytes of the systems of equations that are solved at a time, on a CPU and on a GPU.
_SYSTEM_BYTES, _SYSTEM_BYTES_ON_GPU = 2**25, 2**29


class Descent:
    """The weights of some rows during the descent.

    hessian [K, K] and ``damping``, which is added to its diagonal; gradient [K, N], modified; grid: the codes and
    scales of the rows, which are written. Columns whose inputs were never active are not moved.
    """

    def __init__(self, grid: Grid, gradient: Tensor, hessian: Tensor, damping: float | Tensor) -> None:
        self.grid, self.gradient, self.hessian, self.damping = grid, gradient, hessian, damping
        self.k, self.groups = len(gradient), len(grid.scales)
        self.size = self.k // self.groups
        diagonal = hessian.diagonal()
        self.alive = diagonal > 0
        self.steps = torch.where(self.alive, 1 / (diagonal + damping), 0.0).tolist()
        self.values = torch.empty_like(gradient)
        for group in range(self.groups):
            self._put_values(group)

    def sweep(self, refit: bool, last: bool) -> None:
        """Visit all columns once; ``refit`` moves the scale of each group first. After the ``last`` sweep the gradient
        is not up to date."""
        if refit:
            self.gradient[~self.alive] = 0
        step = LAZY_COLUMNS
        if refit and self.size < LAZY_COLUMNS:
            step = LAZY_COLUMNS // self.size * self.size
        for start in range(0, self.k, step):
            block = slice(start, min(start + step, self.k))
            if refit and self.size > LAZY_COLUMNS:
                self._refit_wide_groups(block)
            moves = self.gradient[block].clone()
            scaled = self._refit_groups(block, moves) if refit and self.size <= LAZY_COLUMNS else None
            places = range(self.k)[block]
            groups = [column // self.size for column in places]
            hessian = self.hessian[block, block]
            move_columns(moves, hessian, self.grid, groups, places, self.values[block], self.steps[block])
            if scaled is not None:
                moves += scaled
            # In the last sweep, earlier columns are not visited again.
            updated = slice(block.stop if last else 0, self.k)
            self.gradient[updated].addmm_(self.hessian[updated, block], moves, alpha=-1)
            self.gradient[block].sub_(moves.mul_(self.damping))

    def _refit_groups(self, block: slice, gradient: Tensor) -> Tensor:
        """Move the scales of the groups inside ``block``; return by how much its weights [L, N] move.

        gradient [L, N], that of the block, is updated.
        """
        moved = torch.zeros_like(gradient)
        for group in range(block.start // self.size, block.stop // self.size):
            rows = slice(group * self.size - block.start, (group + 1) * self.size - block.start)
            units = self._units(group)
            response = self.hessian[block, block][:, rows] @ units
            response[rows] += units * self.damping
            change = self._better_scales(group, _sums(units * gradient[rows]), _sums(units * response[rows]))
            moved[rows] = units * change
            gradient.sub_(response.mul_(change))
        return moved

    def _refit_wide_groups(self, block: slice) -> None:
        """The same for a group that is wider than a block, when its first column is reached; all of the gradient is
        updated."""
        for group in range(-(-block.start // self.size), -(-block.stop // self.size)):
            rows = slice(group * self.size, (group + 1) * self.size)
            units = self._units(group)
            response = self.hessian[:, rows] @ units
            response[rows] += units * self.damping
            change = self._better_scales(group, _sums(units * self.gradient[rows]), _sums(units * response[rows]))
            self.gradient.sub_(response.mul_(change))

    def _better_scales(self, group: int, slope: Tensor, curvature: Tensor) -> Tensor:
        """Move the scales of a group where that lowers the loss; return the changes [N].

        By a change d of the scale the loss changes by ``d (d curvature - 2 slope)``; both [N].
        """
        old = self.grid.scales[group]
        new = self.grid.kind.stored(old + slope / curvature)
        change = new - old
        better = _usable(new, old) & (change * (change * curvature - 2 * slope) < 0)
        change = torch.where(better, change, 0.0)
        self.grid.scales[group] = torch.where(better, new, old)
        self._put_values(group)
        return change

    def refit_scales(self) -> None:
        """Refit all scales of each row together, for its codes; the gradient must be up to date, and is not afterwards.

        For the units c of a row, ``A[g, g'] = c_g H c_g'^T`` and ``v[g] = c_g . gradient_g``, the change of the scales
        that minimizes the loss solves ``A d = v``. A row keeps its scales if the loss of the rounded ones is not lower.
        """
        n = self.gradient.shape[1]
        size = _SYSTEM_BYTES if self.gradient.device.type == "cpu" else _SYSTEM_BYTES_ON_GPU
        step = max(1, size // (8 * self.groups**2))
        for start in range(0, n, step):
            self._refit_rows(slice(start, min(start + step, n)))

    def _refit_rows(self, rows: slice) -> None:
        n = rows.stop - rows.start
        grid = self.grid.rows(rows)
        units = torch.cat([self._units(group, rows) for group in range(self.groups)])
        slopes = _sums((units * self.gradient[:, rows]).view(self.groups, self.size, n).transpose(0, 1))
        matrices = torch.empty(n, self.groups, self.groups, device=units.device)
        # One buffer: to get fresh memory for every group takes as long as the sums.
        buffer = torch.empty_like(units)
        for group in range(self.groups):
            mine = slice(group * self.size, (group + 1) * self.size)
            response = torch.mm(self.hessian[: mine.stop, mine], units[mine], out=buffer[: mine.stop])
            response[mine] += units[mine] * self.damping
            parts = response.mul_(units[: mine.stop]).view(group + 1, self.size, n).transpose(0, 1)
            column = _sums(parts).T
            matrices[:, : group + 1, group] = matrices[:, group, : group + 1] = column
        slopes = slopes.T
        diagonals = matrices.diagonal(dim1=1, dim2=2)
        ridge = (_RIDGE * diagonals.mean(1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny)
        with one_thread():
            factors, failed = torch.linalg.cholesky_ex(matrices + torch.diag_embed(ridge.expand(n, self.groups)))
            changes = torch.cholesky_solve(slopes.unsqueeze(2), factors).squeeze(2)
        old = grid.scales.T
        new = grid.kind.stored(old + changes)
        new = torch.where(_usable(new, old), new, old)
        changes = new - old
        loss = (changes * ((matrices @ changes.unsqueeze(2)).squeeze(2) - 2 * slopes)).sum(1)
        better = (failed == 0) & (loss < 0)
        grid.scales.copy_(torch.where(better.unsqueeze(1), new, old).T)

    def _units(self, group: int, rows: slice = slice(None)) -> Tensor:
        """Return the units [G, N] of a group's codes; 0 where the input was never active."""
        mine = slice(group * self.size, (group + 1) * self.size)
        units = self.grid.kind.units(self.grid.codes[mine, rows], self.grid.zeros[group, rows])
        return units.mul_(self.alive[mine].unsqueeze(1))

    def _put_values(self, group: int) -> None:
        mine = slice(group * self.size, (group + 1) * self.size)
        units = self.grid.kind.units(self.grid.codes[mine], self.grid.zeros[group])
        torch.mul(units, self.grid.scales[group], out=self.values[mine])


def _usable(new: Tensor, old: Tensor) -> Tensor:
    """Whether scales are finite, not too small, and have the sign that they had."""
    return torch.isfinite(new) & (new.abs() >= _SMALLEST) & (new * old.sign() > 0)


def _sums(x: Tensor) -> Tensor:
    """Return the sums of x [L, ...], which is overwritten, over its first dimension: on a CPU by halving, so that their
    bits depend on nothing else; torch's sum on a GPU has the same bits each time."""
    if x.device.type != "cpu":
        return x.sum(0)
    while len(x) > 1:
        half = len(x) // 2
        x[:half] += x[half : 2 * half]
        if len(x) % 2:
            x[0] += x[-1]
        x = x[:half]
    return x[0]
