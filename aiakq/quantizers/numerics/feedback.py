"""Rounding with feedback: the loop of GPTQ (arXiv:2210.17323, algorithm 1) for one weight matrix.

What differs from the published code, and why:

- A group's range is taken from the columns as they are when the group begins. The published code looks at a copy that
  is stale inside a block of 128 columns, so that groups smaller than 128 get ranges of weights that have moved since.
- Besides its whole range a group may get a smaller one, down to half, where that lowers the loss of its columns,
  ``sum of (w - q)^2 / U_ii^2``: the terms that algorithm 1 adds up (U is the Cholesky factor of the inverse Hessian).
- A scale is rounded to the dtype it is stored in before the first error is computed from it.
- Codes leave the loop as they are; nothing is rounded a second time.
- When every column has its code, all are gone over again a few times, and each takes the code that is best for what the
  others became: coordinate descent on the same loss, as in QuantEase (arXiv:2309.01885).
- Inputs that were never active keep their rounded weight instead of losing it.
- At most three matrices of K * K floats are alive at a time, the second moment that is passed in among them; four
  with a drift.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.quantizers.numerics.rounding import codes_for, grouped, ranges, round_weight, scales_for
from aiakq.quantizers.numerics.scale_search import searched_scales

#: Columns whose updates are collected before the rest of the matrix sees them.
LAZY_COLUMNS = 128
#: How often the damping is doubled before a layer is rounded plainly; 0.01 grows to 2.56.
_DOUBLINGS = 8


@dataclass(frozen=True)
class Settings:
    """How to round.

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
class Rounded:
    """Codes [N, K] uint8, scales and zeros [N, K / G] float32; the damping that was needed, None for plain rounding."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    damp: float | None


def round_with_feedback(
    weight: Tensor | Sequence[Tensor], gram: Tensor, settings: Settings, drift: Tensor | None = None
) -> Rounded:
    """Round ``weight`` so that the error of its outputs, ``tr(D gram D^T)``, is small.

    weight [N, K] float32, or several of equal K that count as one below the other; gram [K, K] float32, the second
    moment of the inputs in any scale. Neither is modified. ``drift`` [K, K], in the same scale, is what GPTAQ adds to
    later columns per unit of weight (gptaq.py) times the Hessian: the mean of ``(x' - x) x^T`` where x' are the inputs
    in the unquantized model.
    """
    bits, symmetric, storage = settings.bits, settings.symmetric, settings.storage
    parts = [weight] if isinstance(weight, Tensor) else list(weight)
    k = parts[0].shape[1]
    size = k if settings.group_size == -1 else settings.group_size
    order = column_order(gram.diagonal(), size, settings.order)
    factor, damp = _factor(gram, None if settings.order == "none" else order, settings.damp)
    if factor is None:
        codes, scales, zeros = round_weight(torch.cat(parts), bits, size, symmetric, storage)
        return Rounded(codes, scales, zeros, damp=None)
    shift = None if drift is None else _shift(drift, factor, None if settings.order == "none" else order)

    # Columns become rows, so that each step works on contiguous memory.
    columns = torch.cat([part.T for part in parts], dim=1)
    if settings.order != "none":
        columns = columns[order]
    n = columns.shape[1]
    scales = torch.empty(k // size, n, device=columns.device)
    zeros = torch.empty_like(scales)
    # What an error in each column costs, once the columns after it have made up for it.
    cost = factor.diagonal().pow(-2)
    fixed = settings.order == "static"
    if fixed:
        by_input = cost[torch.argsort(order)].unflatten(0, (-1, size))
        whole = [_scales_of_groups(grouped(part, size), by_input, settings) for part in parts]
        scales, zeros = (torch.cat(tensors).T.contiguous() for tensors in zip(*whole, strict=True))
        del whole
    codes = torch.empty(k, n, dtype=torch.uint8, device=columns.device)
    group_of, places = (order // size).tolist(), order.tolist()
    step = _lazy_columns(size, k)
    scale, zero = scales[0], zeros[0]
    for start in range(0, k, step):
        stop = min(start + step, k)
        block = columns[start:stop]
        local = factor[start:stop, start:stop]
        pivots = local.diagonal().tolist()
        errors = torch.empty_like(block)
        before = None if shift is None else torch.empty_like(block)
        for i in range(stop - start):
            column = start + i
            group = group_of[column]
            if not fixed and column % size == 0:
                ahead = columns[column : column + size]
                scales[group], zeros[group] = _scales_of_groups(ahead.T, cost[column : column + size], settings)
            scale, zero = scales[group], zeros[group]
            code = codes_for(block[i], scale, zero, bits)
            codes[places[column]] = code
            error = torch.sub(block[i], code.sub_(zero).mul_(scale), out=errors[i]).div_(pivots[i])
            rest = block[i + 1 :]
            if before is not None and shift is not None:
                before[i] = block[i]
                rest.addr_(shift[column, column + 1 : stop], before[i])
            rest.addr_(local[i, i + 1 :], error, alpha=-1)
        columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
        if before is not None and shift is not None:
            columns[stop:].addmm_(shift[start:stop, stop:].T, before)
    del columns, factor, shift
    if settings.sweeps:
        first = 0
        for part in parts:
            rows = slice(first, first + len(part))
            first = rows.stop
            codes[:, rows] = _improved(
                part, codes[:, rows], scales[:, rows], zeros[:, rows], gram, drift, settings, damp or 0
            )
    return Rounded(codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), damp)


def _improved(
    weight: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    gram: Tensor,
    drift: Tensor | None,
    settings: Settings,
    damp: float,
) -> Tensor:
    """Codes [K, N] after going over all columns again, each time taking the code that is best while the others stay.

    Coordinate descent on the loss that the loop minimizes, from where it ended, so that no step makes it larger. With q
    what the codes stand for, ``gram (w - q)`` (plus ``drift^T w``) says in which direction each weight would like to
    move; it is kept up to date in blocks. weight [N, K]; codes [K, N] uint8, scales and zeros [K / G, N].
    """
    codes = codes.clone()
    k = len(codes)
    size = k // len(scales)
    mean = gram.diagonal().mean() * damp
    values = torch.empty(codes.shape, device=codes.device)
    for group in range(len(scales)):
        rows = slice(group * size, (group + 1) * size)
        values[rows] = (codes[rows] - zeros[group]) * scales[group]
    gap = weight.T - values
    pull = (gram @ gap).add_(gap.mul_(mean))
    del gap
    if drift is not None:
        pull.addmm_(drift.T, weight.T)
    steps = torch.where(gram.diagonal() > 0, 1 / (gram.diagonal() + mean), 0.0).tolist()
    for sweep in range(settings.sweeps):
        for start in range(0, k, LAZY_COLUMNS):
            stop = min(start + LAZY_COLUMNS, k)
            local = gram[start:stop, start:stop]
            block = pull[start:stop].clone()
            moves = torch.empty_like(block)
            for i in range(stop - start):
                column = start + i
                scale, zero = scales[column // size], zeros[column // size]
                wish = torch.add(values[column], block[i], alpha=steps[column])
                code = codes_for(wish, scale, zero, settings.bits)
                codes[column] = code
                new = code.sub_(zero).mul_(scale)
                torch.sub(new, values[column], out=moves[i])
                values[column] = new
                block[i + 1 :].addr_(local[i, i + 1 :], moves[i], alpha=-1)
            # The last time, nobody comes back to the columns before.
            heard = slice(stop if sweep == settings.sweeps - 1 else 0, k)
            pull[heard].addmm_(gram[heard, start:stop], moves, alpha=-1)
            pull[start:stop].sub_(moves.mul_(mean))
    return codes


def _scales_of_groups(groups: Tensor, cost: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Scales and zero points [...] of groups [..., G]; ``cost`` [..., G] weighs the squared error of each column."""
    if settings.search:
        return searched_scales(groups, settings.bits, settings.symmetric, settings.storage, cost)
    return scales_for(*ranges(groups, settings.symmetric), settings.bits, settings.symmetric, settings.storage)


def _shift(drift: Tensor, factor: Tensor, order: Tensor | None) -> Tensor:
    """What a weight in column i adds to the columns after it, ``triu(drift U^T, 1) U`` [K, K] (arXiv:2504.02692)."""
    if order is not None:
        drift = drift[order][:, order]
    return (drift @ factor.T).triu_(1) @ factor


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


def _factor(gram: Tensor, order: Tensor | None, damp: float) -> tuple[Tensor | None, float | None]:
    """The upper Cholesky factor of the inverse of the damped Hessian, and the damping it took; (None, None) if none.

    The Hessian is ``gram`` with its columns in ``order``. float32 first, float64 when that fails, then more and more
    damping.
    """
    diagonal = gram.diagonal()
    dead = diagonal <= 0
    if not bool(torch.isfinite(diagonal).all()) or bool(dead.all()):
        return None, None
    mean = diagonal[~dead].mean()
    if order is not None:
        dead = dead[order]
    attempts = [(torch.float32, damp), *((torch.float64, damp * 2**i) for i in range(_DOUBLINGS + 1))]
    with _same_on_any_number_of_threads(len(gram)):
        for dtype, amount in attempts:
            upper = _inverse_factor(gram, order, dead, mean.to(dtype), amount)
            if upper is not None:
                return upper, amount
    return None, None


def _inverse_factor(gram: Tensor, order: Tensor | None, dead: Tensor, mean: Tensor, damp: float) -> Tensor | None:
    """The upper Cholesky factor of the inverse of the damped Hessian, float32, or None if there is none.

    ``mean`` [], whose dtype is computed in, is the diagonal of ``dead`` inputs. Each matrix is let go before the
    next but one is made.
    """
    base = gram.to(mean.dtype, copy=True) if order is None else gram[order][:, order].to(mean.dtype)
    base.diagonal()[dead] = mean
    base.diagonal().add_(mean, alpha=damp)
    result, failed = torch.linalg.cholesky_ex(base)
    del base
    if bool(failed):
        return None
    result = torch.cholesky_inverse(result)
    result, failed = torch.linalg.cholesky_ex(result, upper=True)
    result = result.to(torch.float32)
    fine = not bool(failed) and bool(torch.isfinite(result).all()) and bool((result.diagonal() > 0).all())
    return result if fine else None
