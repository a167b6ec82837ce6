"""gptq: round one input column after the other, and let the columns not yet rounded make up for the error.

Frantar et al. 2022 (arXiv:2210.17323), algorithm 1, with lazy updates in blocks. Inside a decoder block it is truly
sequential: query, key and value first, then the attention output, then gate and up, then down, each from inputs that
already passed through what was rounded before. What differs from the published code, and why:

- Linears that share an input share one Hessian and are rounded as one matrix; rows do not depend on each other.
- A group's range is taken from the columns as they are when the group begins. The published code looks at a copy that
  is stale inside a block of 128 columns, so that groups smaller than 128 get ranges of weights that have moved since.
- Besides its whole range a group may get a smaller one, down to half, where that lowers the loss of its columns,
  ``sum of (w - q)^2 / U_ii^2``: the terms that algorithm 1 adds up (U is the Cholesky factor of the inverse Hessian).
- A scale is rounded to the dtype it is stored in before the first error is computed from it.
- Codes leave the loop as they are; nothing is rounded a second time.
- Inputs that were never active keep their rounded weight instead of losing it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.quantizers.rounding import codes_for, grouped, ranges, round_weight, scales_for
from aiakq.quantizers.work import BlockWork

#: Columns whose updates are collected before the rest of the matrix sees them.
LAZY_COLUMNS = 128
#: Ranges tried for a group: the whole one, then each a fortieth smaller than the one before.
RANGE_STEPS = 20
#: How often the damping is doubled before a layer is rounded plainly; 0.01 grows to 2.56.
_DOUBLINGS = 8


def quantize_block(work: BlockWork) -> None:
    """Round the linears of the block, group by group in the order they run."""
    for group in work.groups:
        gram = work.grams(group[:1])[group[0]]
        for alike in work.alike(group):
            _round_together(work, alike, gram)
    for name in work.linears:
        if name not in work.finished:
            work.finish(name, *work.round_plainly(name))


def _round_together(work: BlockWork, names: tuple[str, ...], gram: Tensor) -> None:
    """Round linears that share an input and are stored alike as one matrix."""
    options, spec = work.plan.options, work.spec(names[0])
    joined = torch.cat([work.weight(name) for name in names])
    settings = Settings(spec.bits, spec.group_size, spec.symmetric, work.plan.scales, options.act_order, options.damp)
    rounded = round_with_feedback(joined, gram, settings)
    where = f"{work.prefix}.{names[0]}"
    if rounded.damp is None:
        work.warnings.append(f"The Hessian of {where} could not be factored; the layer was rounded plainly.")
    elif rounded.damp > options.damp:
        work.warnings.append(f"The Hessian of {where} needed a damping of {rounded.damp:g}.")
    start = 0
    for name in names:
        rows = slice(start, start + work.linears[name].out_features)
        work.finish(name, rounded.codes[rows].clone(), rounded.scales[rows].clone(), rounded.zeros[rows].clone())
        start = rows.stop


@dataclass(frozen=True)
class Settings:
    """How to round.

    storage  the dtype scales are stored in.
    order    none, static or group; see ``column_order``.
    search   whether groups may have less than their whole range, as the published code does not.
    """

    bits: int
    group_size: int
    symmetric: bool
    storage: torch.dtype
    order: str = "none"
    damp: float = 0.01
    search: bool = True


@dataclass(frozen=True)
class Rounded:
    """Codes [N, K] uint8, scales and zeros [N, K / G] float32; the damping that was needed, None for plain rounding."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    damp: float | None


def round_with_feedback(weight: Tensor, gram: Tensor, settings: Settings) -> Rounded:
    """Round ``weight`` so that the error of its outputs, ``tr(D gram D^T)``, is small.

    weight [N, K] float32; gram [K, K] float32, the second moment of the inputs in any scale. Neither is modified.
    """
    bits, symmetric, storage = settings.bits, settings.symmetric, settings.storage
    n, k = weight.shape
    size = k if settings.group_size == -1 else settings.group_size
    order = column_order(gram.diagonal(), size, settings.order)
    factor, damp = _factor(gram[order][:, order], settings.damp)
    if factor is None:
        return Rounded(*round_weight(weight, bits, size, symmetric, storage), damp=None)

    scales = torch.empty(n, k // size, device=weight.device)
    zeros = torch.empty_like(scales)
    # What an error in each column costs, once the columns after it have made up for it.
    cost = factor.diagonal().pow(-2)
    fixed = settings.order == "static"
    if fixed:
        by_input = cost[torch.argsort(order)].unflatten(0, (-1, size))
        scales, zeros = _scales_of_groups(grouped(weight, size), by_input, settings)
    # Columns become rows, so that each step works on contiguous memory.
    columns = weight[:, order].T.contiguous()
    codes = torch.empty(k, n, dtype=torch.uint8, device=weight.device)
    group_of = (order // size).tolist()
    step = _lazy_columns(size, k)
    for start in range(0, k, step):
        stop = min(start + step, k)
        block = columns[start:stop]
        local = factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for i in range(stop - start):
            column = start + i
            group = group_of[column]
            if not fixed and column % size == 0:
                ahead = columns[column : column + size]
                scale, zero = _scales_of_groups(ahead.T, cost[column : column + size], settings)
                scales[:, group], zeros[:, group] = scale, zero
            elif fixed:
                scale, zero = scales[:, group], zeros[:, group]
            code = codes_for(block[i], scale, zero, bits)
            codes[column] = code.to(torch.uint8)
            error = (block[i] - (code - zero) * scale) / local[i, i]
            errors[i] = error
            block[i + 1 :].addr_(local[i, i + 1 :], error, alpha=-1)
        columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    inverse = torch.argsort(order)
    return Rounded(codes[inverse].T.contiguous(), scales, zeros, damp)


def _scales_of_groups(groups: Tensor, cost: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Scales and zero points [...] of groups [..., G]; ``cost`` [..., G] weighs the squared error of each column."""
    bits, symmetric, storage = settings.bits, settings.symmetric, settings.storage
    low, high = ranges(groups, symmetric)
    best, zeros = scales_for(low, high, bits, symmetric, storage)
    lowest: Tensor | None = None
    for step in range(RANGE_STEPS if settings.search else 0):
        part = 1 - step / (2 * RANGE_STEPS)
        scale, zero = scales_for(low * part, high * part, bits, symmetric, storage)
        codes = codes_for(groups, scale.unsqueeze(-1), zero.unsqueeze(-1), bits)
        gap = (codes - zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).sub_(groups)
        loss = gap.square_().mul_(cost).sum(-1)
        if lowest is None:
            lowest = loss
            continue
        better = loss < lowest
        best, zeros = torch.where(better, scale, best), torch.where(better, zero, zeros)
        lowest = torch.where(better, loss, lowest)
    return best, zeros


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


@contextmanager
def _same_on_any_number_of_threads(k: int) -> Iterator[None]:
    """LAPACK's factorizations are the one step whose last bits depend on the number of threads, so they get one.

    Beyond 4096 inputs the time is worth more: seconds per layer, and minutes for a model.
    """
    threads = torch.get_num_threads()
    if k <= 4096:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _factor(gram: Tensor, damp: float) -> tuple[Tensor | None, float | None]:
    """The upper Cholesky factor of the inverse of the damped Hessian, and the damping it took; (None, None) if none.

    float32 first, float64 when that fails, then more and more damping.
    """
    diagonal = gram.diagonal()
    dead = diagonal <= 0
    if not bool(torch.isfinite(diagonal).all()) or bool(dead.all()):
        return None, None
    mean = diagonal[~dead].mean()
    base = gram.clone()
    base.diagonal()[dead] = mean
    with _same_on_any_number_of_threads(len(gram)):
        return _first_that_works(base, mean, damp)


def _first_that_works(base: Tensor, mean: Tensor, damp: float) -> tuple[Tensor | None, float | None]:
    """The factor for the first of the attempts that succeeds."""
    attempts = [(torch.float32, damp), *((torch.float64, damp * 2**i) for i in range(_DOUBLINGS + 1))]
    for dtype, amount in attempts:
        damped = base.to(dtype, copy=True)
        damped.diagonal().add_(mean.to(dtype), alpha=amount)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if bool(failed):
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        upper = upper.to(torch.float32)
        if not bool(failed) and bool(torch.isfinite(upper).all()) and bool((upper.diagonal() > 0).all()):
            return upper, amount
    return None, None
