"""The inner loop of GPTQ: columns of one lazy-update block rounded one by one, with error compensation.

Here a column of the weight is a row of a tensor [L, N], so that each step works on contiguous memory. The native
library keeps a few weights in the cache of a core through all columns; torch goes over all of them for each column.
Both round products before they add them up, but not all of torch's builds do, so last bits may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aiakq.kernels.cpu import gptq as native
from aiakq.quantizers.numerics.rounding import codes_for


class Grid(NamedTuple):
    """What columns are rounded to: scales and zeros [K / G, N] float32; and their codes [K, N] uint8, written."""

    bits: int
    scales: Tensor
    zeros: Tensor
    codes: Tensor


def round_columns(
    block: Tensor,
    hinv: Tensor,
    grid: Grid,
    groups: Sequence[int],
    places: Sequence[int],
    drift: Tensor | None = None,
    before: Tensor | None = None,
) -> None:
    """Round the first columns of ``block`` [L, N], and leave their errors there.

    An error is what a code leaves of a weight over ``hinv[i, i]``, hinv [L, L]; column j > i loses ``hinv[i, j]`` times
    it. With ``drift`` [L, L] it gains ``drift[i, j]`` times what column i was before, which goes into ``before``.
    ``groups`` and ``places``: the row of scales, and of codes, of each column to round.
    """
    if native.supports(block):
        native.round_columns(block, hinv, *grid, groups, places, drift=drift, before=before)
        return
    pivots = hinv.diagonal().tolist()
    for i, (group, place) in enumerate(zip(groups, places, strict=True)):
        column, rest = block[i], block[i + 1 :]
        scale, zero = grid.scales[group], grid.zeros[group]
        code = codes_for(column, scale, zero, grid.bits)
        grid.codes[place] = code
        error = torch.sub(column, code.sub_(zero).mul_(scale)).div_(pivots[i])
        if drift is not None and before is not None:
            before[i] = column
            rest.addr_(drift[i, i + 1 :], column)
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
    """Give every column of a block the code nearest to ``values + steps * gradient``; its move replaces the gradient.

    values [L, N] are what the codes stand for, before and after. gradient [L, N] is that of the loss by what the codes
    leave of the weights: in column j > i it falls by ``hessian[i, j]``, hessian [L, L], for each unit that column i
    moves. values, gradient and the codes of ``grid`` are modified.
    """
    if native.supports(gradient):
        native.round_columns(gradient, hessian, *grid, groups, places, values=values, steps=steps)
        return
    for i, (group, place) in enumerate(zip(groups, places, strict=True)):
        scale, zero = grid.scales[group], grid.zeros[group]
        code = codes_for(torch.add(values[i], gradient[i], alpha=steps[i]), scale, zero, grid.bits)
        grid.codes[place] = code
        new = code.sub_(zero).mul_(scale)
        torch.sub(new, values[i], out=gradient[i])
        values[i] = new
        gradient[i + 1 :].addr_(hessian[i, i + 1 :], gradient[i], alpha=-1)
