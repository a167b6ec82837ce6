"""Clipping search: the range of each group that minimizes the quantization error.

A range that covers the largest weight of a group spends quantization levels on rare weights. The search tries the full
range and smaller ones down to half of it, and keeps the one with the smallest value of the caller's loss:
``sum |w - q|^2.4`` if nothing is known about the inputs (the norm of the published GPTQ code, which penalizes large
errors slightly more than squares do), ``sum c_j (w_j - q_j)^2`` if each input has a cost. Ties go to the full range.

Symmetric codes reach one step further below zero than above it: -8 to 7 at 4 bits. With a negative scale the longer
side is above zero, so both signs of every range are tried (at 2 to 4 bits, where a step is a large part of the range).
Ties go to the positive scale.

At 8 bits there are levels enough for the largest weight, and a much smaller range is never better. There ``round_near``
tries five ranges within 1 % of the full one: which of them suits the weights of a row, and the rounding of the scale to
its storage dtype, is a matter of chance, worth 1 to 3 % of the error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from aiakq.kernels.triton import gptq as on_gpu
from aiakq.rounding.integers import (
    Rounding,
    codes_for,
    grouped,
    ranges,
    rows_at_once,
    scales_for,
    smallest_scale,
)

#: Number of ranges tried for a group: the full one, then each smaller by a fortieth.
RANGE_STEPS = 20
NORM = 2.4
#: Fractions of the full range that round_near tries.
NEAR_FRACTIONS = (1.0, 0.996, 1.004, 0.992, 1.008)
#: The largest number of bits at which negative scales are tried.
SIGNED_BITS = 4


def range_fractions() -> list[float]:
    """Return the fractions of the full range that are tried, in descending order."""
    return [1 - step / (2 * RANGE_STEPS) for step in range(RANGE_STEPS)]


def may_be_signed(bits: int, symmetric: bool) -> bool:
    """Whether negative scales are tried for codes of this kind."""
    return symmetric and bits <= SIGNED_BITS


def searched_scales(
    groups: Tensor,
    bits: int,
    symmetric: bool,
    storage: torch.dtype,
    cost: Tensor | None = None,
    signed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the best scales and zero points [...] among the ranges tried for groups [..., G]; see scales_for.

    ``cost`` [..., G] weighs the squared error of each weight; without it the error counts to the power 2.4. ``signed``
    allows negative scales, which are tried for symmetric codes of at most SIGNED_BITS bits.
    """
    signed = signed and may_be_signed(bits, symmetric)
    if cost is not None and on_gpu.searches(groups, storage):
        smallest = smallest_scale(storage)
        return on_gpu.search(groups, bits, symmetric, storage, cost, range_fractions(), smallest, signed)
    return _best_scales(
        groups,
        bits,
        symmetric,
        storage,
        range_fractions(),
        lambda gap: (gap.abs_().pow_(NORM) if cost is None else gap.square_().mul_(cost)).sum(-1),
        (1, -1) if signed else (1,),
    )


def _near_scales(groups: Tensor, bits: int, symmetric: bool, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return those of least squared error among the ranges near the full one; see searched_scales."""
    return _best_scales(groups, bits, symmetric, storage, NEAR_FRACTIONS, partial(torch.linalg.vector_norm, dim=-1))


def _best_scales(
    groups: Tensor,
    bits: int,
    symmetric: bool,
    storage: torch.dtype,
    fractions: Sequence[float],
    loss_of: Callable[[Tensor], Tensor],
    signs: Sequence[int] = (1,),
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points [...] of the sign and fraction of the range of least loss; the first one wins ties.

    ``loss_of`` takes the errors of groups [..., G], which it may overwrite, and returns [...].
    """
    low, high = ranges(groups, symmetric)
    best, zeros = scales_for(low, high, bits, symmetric, storage)
    lowest: Tensor | None = None
    for sign, fraction in itertools.product(signs, fractions):
        scale, zero = scales_for(low * fraction, high * fraction, bits, symmetric, storage)
        scale = scale if sign > 0 else -scale
        gap = codes_for(groups, scale.unsqueeze(-1), zero.unsqueeze(-1), bits)
        loss = loss_of(gap.sub_(zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).sub_(groups))
        if lowest is None:
            lowest = loss
            continue
        better = loss < lowest
        best, zeros = torch.where(better, scale, best), torch.where(better, zero, zeros)
        lowest = torch.where(better, loss, lowest)
    return best, zeros


def round_searched(
    weight: Tensor, bits: int, group_size: int, symmetric: bool, storage: torch.dtype, signed: bool = False
) -> Rounding:
    """Round every weight to the nearest code of its group, with ranges searched by the rounding error of the weights.

    weight [N, K] float32; ``signed`` as in ``searched_scales``. Returns codes [N, K] uint8, scales and zeros [N, K / G]
    float32.
    """
    search = partial(searched_scales, signed=signed)
    return _round_with(search, weight, bits, group_size, symmetric, storage)


def round_near(weight: Tensor, bits: int, group_size: int, symmetric: bool, storage: torch.dtype) -> Rounding:
    """The same with the range near the full one of least squared error: weight [N, K] float32."""
    return _round_with(_near_scales, weight, bits, group_size, symmetric, storage)


def _round_with(
    search: Callable[[Tensor, int, bool, torch.dtype], tuple[Tensor, Tensor]],
    weight: Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    storage: torch.dtype,
) -> Rounding:
    groups = grouped(weight, group_size)
    scales = torch.empty(groups.shape[:2], device=weight.device)
    zeros = torch.empty_like(scales)
    codes = torch.empty_like(weight, dtype=torch.uint8)
    step = rows_at_once(weight)
    for start in range(0, len(weight), step):
        part = groups[start : start + step]
        scale, zero = search(part, bits, symmetric, storage)
        scales[start : start + step], zeros[start : start + step] = scale, zero
        codes[start : start + step] = codes_for(part, scale.unsqueeze(-1), zero.unsqueeze(-1), bits).flatten(1)
    return codes, scales, zeros


def best_clip(
    weight: Tensor, moments: Tensor, bits: int, group_size: int, symmetric: bool, storage: torch.dtype
) -> Tensor:
    """Return the clipping magnitude of each group of each row, [N, K / G]: from the full range down to 52.5 % of it.

    moments [K / G, G, G]: the second moment of each group's inputs. The loss of a group is ``d moment d^T`` with its
    rounding error d, so a clipped range is chosen only if it lowers the error of the group's output.
    """
    size = weight.shape[1] if group_size == -1 else group_size
    best = torch.empty(len(weight), weight.shape[1] // size, device=weight.device)
    step = rows_at_once(weight)
    for start in range(0, len(weight), step):
        groups = grouped(weight[start : start + step], size).contiguous()
        low, high = ranges(groups, symmetric)
        whole = torch.maximum(-low, high)
        largest, lowest = whole, None
        for fraction in range_fractions():
            cut = whole * fraction
            scale, zero = scales_for(torch.maximum(low, -cut), torch.minimum(high, cut), bits, symmetric, storage)
            gap = codes_for(groups, scale.unsqueeze(-1), zero.unsqueeze(-1), bits)
            gap.sub_(zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).sub_(groups)
            across = gap.transpose(0, 1)  # [K / G, n, G]
            loss = (torch.bmm(across, moments) * across).sum(-1).T
            if lowest is None:
                lowest = loss
            else:
                better = loss < lowest
                largest = torch.where(better, cut, largest)
                lowest = torch.where(better, loss, lowest)
        best[start : start + step] = largest
    return best
