"""awq: protect the inputs that matter by scaling them up before rounding, then cut ranges where that pays.

Lin et al. 2023 (arXiv:2306.00978). For each place where a scale can be folded (groups.py), a grid of scales between
"follow the activations" and "follow the weights" is tried, and the one whose rounded weights change the output of the
surrounding module least is folded. Then each group of each row may have its range cut, if that lowers the error of the
group's output. Doing nothing is among the candidates of both searches. What differs from the published code:

- Losses of single linears and of groups are computed from the second moment of the inputs, so over every calibration
  token; only the losses through attention and through a gated MLP use a sample of tokens.
- The attention output is scaled under grouped-query attention as well, with one scale per shared value channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.groups import Pair
from aiakq.quantizers.rounding import dequantize, grouped, ranges, round_weight
from aiakq.quantizers.work import BlockWork, Part

GRID = 20
#: Ranges are cut to no less than about half.
CLIP_STEPS = 20
#: Tokens for losses that need a forward pass of their own for every candidate.
SEARCH_TOKENS = 4096
#: Cutting ranges of queries and keys disturbs their product, so these are left whole (as published).
_NEVER_CLIPPED = ("q_proj", "k_proj")


def quantize_block(work: BlockWork) -> None:
    """Scale, cut and round the linears of the block; those of experts a few experts at a time."""
    for part in work.parts():
        _quantize_part(work, part)


def _quantize_part(work: BlockWork, part: Part) -> None:
    group_of = {name: group[0] for group in part.groups for name in group}
    pairs = [pair for pair in part.pairs if any(name in group for group in work.groups for name in pair.targets)]
    # Where a scale is shared by experts, which see a few tokens each, a router shows what they have in common.
    shown = {pair: group_of.get(pair.witness, pair.witness) for pair in pairs}
    means: dict[str, Tensor] = {}
    grams = _statistics(work, dict.fromkeys(group_of.values()), dict.fromkeys(shown.values()), means)
    parents = _parent_calls(work, pairs)
    chosen: list[tuple[Pair, Tensor]] = []
    for pair in pairs:
        loss = _loss(work, pair, grams.get(shown[pair]), parents.get(pair.parent))
        chosen.append((pair, best_scales(work, pair, means[shown[pair]], loss)))
    parents.clear()
    for pair, scales in chosen:
        columns = work.fold(pair, scales)
        for shared in {group_of[name] for name in pair.targets if name in group_of}:
            grams[shared] = grams[shared] / columns / columns.unsqueeze(1)
    for name in part.linears:
        weight, spec = work.weight(name), work.spec(name)
        limits = None
        if name in group_of and not name.endswith(_NEVER_CLIPPED):
            limits = best_limits(
                weight, grams[group_of[name]], spec.bits, spec.group_size, spec.symmetric, work.plan.scales
            )
        work.finish(name, *work.round_plainly(name, limits=limits))


def _statistics(
    work: BlockWork, names: Iterable[str], shown: Iterable[str], means: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The second moments of the inputs of ``names``; ``means`` is filled with the mean magnitudes [K] of those and of
    the inputs of ``shown``, in the same pass."""
    names = list(names)
    every = [*names, *(name for name in shown if name not in names)]
    sums: dict[str, Tensor] = {}
    rows: dict[str, int] = dict.fromkeys(every, 0)
    totals: dict[str, Tensor] = {}

    def see(name: str) -> Callable[[Tensor], None]:
        def note(x: Tensor) -> None:
            if name not in totals:
                totals[name] = torch.zeros(x.shape[1], device=x.device)
                if name in names:
                    sums[name] = torch.zeros(x.shape[1], x.shape[1], device=x.device)
            if name in names:
                sums[name].addmm_(x.T, x)
            totals[name] += x.abs().sum(0)
            rows[name] += len(x)

        return note

    if every:
        work.observe({name: see(name) for name in every})
    means.update({name: totals[name] / rows[name] for name in every})
    return {name: sums[name] / rows[name] for name in names}


# --- scales ---------------------------------------------------------------------------------------------------------


def candidates(activations: Tensor, weights: Tensor) -> Iterator[Tensor]:
    """Identity, then the published grid: ``x^r / w^(1-r)``, r = 0, 1/20 .. 19/20, normalized. Each [channels]."""
    yield torch.ones_like(activations)
    for step in range(GRID):
        ratio = step / GRID
        scales = (activations.pow(ratio) / (weights.pow(1 - ratio) + 1e-4)).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        yield torch.where(torch.isfinite(scales) & (scales > 0), scales, torch.ones_like(scales))


def best_scales(work: BlockWork, pair: Pair, activations: Tensor, loss: Callable[[dict[str, Tensor]], float]) -> Tensor:
    """The candidate with the lowest loss, for every channel of the pair's source.

    activations [K] mean magnitudes of the targets' inputs; ``loss`` takes the targets' weights as they would act.
    """
    targets = work.tried(pair)
    joined = torch.cat([work.weight(name) for name in targets])
    groups = grouped(joined, work.spec(targets[0]).group_size).abs()
    relative = (groups / (groups.amax(-1, keepdim=True) + 1e-6)).flatten(1).mean(0)
    heads = work.plan.heads
    if pair.heads:
        activations, relative = heads.tie(activations, "mean"), heads.tie(relative, "mean")
    best: tuple[float, Tensor] | None = None
    for scales in candidates(activations, relative):
        columns = heads.spread(scales) if pair.heads else scales
        trial = {}
        for name in targets:
            rounded = work.round_plainly(name, work.weight(name) * columns)
            trial[name] = dequantize(*rounded, work.spec(name).group_size) / columns
        value = loss(trial)
        if value == value and (best is None or value < best[0]):
            best = (value, scales)
    return best[1] if best is not None else torch.ones_like(activations)


def _loss(
    work: BlockWork, pair: Pair, gram: Tensor | None, calls: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] | None
) -> Callable[[dict[str, Tensor]], float]:
    """The squared error of the parent's output for trial weights of the targets."""
    if calls is None:
        assert gram is not None, "the inputs of a linear that is searched alone were seen"

        def linear(trial: dict[str, Tensor]) -> float:
            total = 0.0
            for name, weight in trial.items():
                difference = weight - work.weight(name)
                total += float(((difference @ gram) * difference).sum())
            return total

        return linear
    parent = work.block.get_submodule(pair.parent)

    def through(trial: dict[str, Tensor]) -> float:
        kept = {name: work.linears[name].weight for name in trial}
        total = 0.0
        try:
            for name, weight in trial.items():
                work.linears[name].weight = nn.Parameter(weight, requires_grad=False)
            with torch.inference_mode():
                for args, kwargs, wanted in calls:
                    total += float((_first(parent(*args, **kwargs)) - wanted).square().sum())
        finally:
            for name, weight in kept.items():
                work.linears[name].weight = weight
        return total

    return through


def _parent_calls(
    work: BlockWork, pairs: list[Pair]
) -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any], Tensor]]]:
    """How each parent that is no linear is called on a sample of tokens, and what it answers."""
    names = {pair.parent for pair in pairs if pair.parent not in work.linears}
    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], Tensor]]] = {name: [] for name in names}

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if bool(torch.isfinite(_first(output)).all()):
                calls[name].append((args, kwargs, _first(output)))

        return note

    handles = [work.block.get_submodule(name).register_forward_hook(hook(name), with_kwargs=True) for name in names]
    try:
        with torch.inference_mode():
            for batch in work.some_batches(SEARCH_TOKENS) if names else []:
                work.inputs.run(work.block, work.index, batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


# --- ranges ---------------------------------------------------------------------------------------------------------


def best_limits(
    weight: Tensor, gram: Tensor, bits: int, group_size: int, symmetric: bool, storage: torch.dtype
) -> Tensor:
    """The largest magnitude each group of each row should keep, [N, K / G]: the whole range, or down to 55 % of it.

    The loss of a group is ``d gram_g d^T``, d its rounding error and gram_g [G, G] the second moment of its inputs, so
    the whole range loses to a cut one only where that lowers the error of the group's output.
    """
    size = weight.shape[1] if group_size == -1 else group_size
    groups = grouped(weight, size)
    low, high = ranges(groups, symmetric=False)
    largest = torch.maximum(-low, high)
    count = groups.shape[1]
    diagonal = torch.stack([gram[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])
    best = largest
    lowest: Tensor | None = None
    for step in range(CLIP_STEPS):
        limits = largest * (1 - step / (2 * CLIP_STEPS))
        rounded = round_weight(weight, bits, size, symmetric, storage, limits)
        gap = (grouped(dequantize(*rounded, size), size) - groups).transpose(0, 1)  # [K / G, N, G]
        loss = (torch.bmm(gap, diagonal) * gap).sum(-1).T
        if lowest is None:
            lowest = loss
        else:
            better = loss < lowest
            best = torch.where(better, limits, best)
            lowest = torch.where(better, loss, lowest)
    return best
