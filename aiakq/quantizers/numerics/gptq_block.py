"""The inner loop of GPTQ: columns of one lazy-update block rounded one by one, with error compensation.

Tensors [L, N] are transposed: a row is a column of the weight, so that each step works on contiguous memory. The native
library keeps a few weights in a core's cache through all columns, and the kernel for GPUs in registers; torch passes
over all of them for each column. Torch and the library round products before adding them, but some torch builds do not,
so the last bits may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from aiakq.kernels.cpu import gptq as native
from aiakq.kernels.triton import gptq as on_gpu
from aiakq.quantizers.numerics.code_grid import CodeGrid


class Grid(NamedTuple):
    """Rounded weights: a grid of codes, scales and zeros [K / G, N] float32, and the codes [K, N] uint8.

    All three tensors are written.
    """

    kind: CodeGrid
    scales: Tensor
    zeros: Tensor
    codes: Tensor

    def rows(self, rows: slice) -> Grid:
        """Return a view of some rows of the weight."""
        return Grid(self.kind, self.scales[:, rows], self.zeros[:, rows], self.codes[:, rows])

    def loop(self, block: Tensor) -> ModuleType | None:
        """Return the implementation of the loop for this grid and ``block`` [L, N]; None: torch's, below."""
        if self.kind.integer_bits is None:
            return None
        return next((each for each in (native, on_gpu) if each.supports(block)), None)

    @property
    def arguments(self) -> tuple[int | None, Tensor, Tensor, Tensor]:
        """Return what implementations take of this grid."""
        return self.kind.integer_bits, self.scales, self.zeros, self.codes


def round_columns(block: Tensor, hinv: Tensor, grid: Grid, groups: Sequence[int], places: Sequence[int]) -> None:
    """Round the first columns of ``block`` [L, N] and replace them by their errors.

    An error is the rounding error of a weight divided by ``hinv[i, i]``, hinv [L, L]; ``hinv[i, j]`` times it is
    subtracted from column j > i. ``groups`` and ``places``: the row of scales, and of codes, of each column to round.
    """
    loop = grid.loop(block)
    if loop is not None:
        loop.round_columns(block, hinv, *grid.arguments, groups, places)
        return
    pivots = hinv.diagonal().tolist()
    for i, (group, place) in enumerate(zip(groups, places, strict=True)):
        column, rest = block[i], block[i + 1 :]
        scale, zero = grid.scales[group], grid.zeros[group]
        code = grid.kind.codes(column, scale, zero)
        grid.codes[place] = code
        error = torch.sub(column, grid.kind.units(code, zero).mul_(scale)).div_(pivots[i])
        block[i] = error
        rest.addr_(hinv[i, i + 1 :], error, alpha=-1)


def move_columns(
    gradient: Tensor,
    hessian: Tensor,
    grid: Grid,
    groups: Sequence[int],
    places: Sequence[int],
    values: Tensor,
    steps: Sequence[float],
) -> None:
    """Move every column of a block to the code nearest to ``values + steps * gradient``; the moves replace the
    gradient.

    values [L, N] are the dequantized weights, and are updated. gradient [L, N] is that of the loss with respect to the
    rounding error: in column j > i it decreases by ``hessian[i, j]``, hessian [L, L], per unit that column i moves.
    values, gradient and the codes of ``grid`` are modified.
    """
    loop = grid.loop(gradient)
    if loop is not None:
        loop.round_columns(gradient, hessian, *grid.arguments, groups, places, values=values, steps=steps)
        return
    for i, (group, place) in enumerate(zip(groups, places, strict=True)):
        scale, zero = grid.scales[group], grid.zeros[group]
        code = grid.kind.codes(torch.add(values[i], gradient[i], alpha=steps[i]), scale, zero)
        grid.codes[place] = code
        new = grid.kind.units(code, zero).mul_(scale)
        torch.sub(new, values[i], out=gradient[i])
        values[i] = new
        gradient[i + 1 :].addr_(hessian[i, i + 1 :], gradient[i], alpha=-1)
