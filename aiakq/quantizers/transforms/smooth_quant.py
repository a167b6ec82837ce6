"""smooth_quant: 8-bit weights and 8-bit activations, after moving outliers from activations into weights.

Xiao et al. 2023 (arXiv:2211.10438), equation 4: ``s_j = max|X_j|^a / max|W_j|^(1-a)`` per input channel j; activations
are divided and weights multiplied by s, which a norm or a linear before absorbs. The paper folds the two inputs that
follow a norm; here the inputs of the attention output and of the last MLP linear are folded as well, into the value
and the up projection, which costs nothing at run time. The strength a is that of the model's family, the one given, or
(``auto``) for each place the one whose 8-bit weights and activations change the output of the surrounding module
least. Weights are then rounded per row; activations get one scale per token at run time, or a stored one per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.block import BlockWork
from aiakq.quantizers.model.groups import Pair, watching
from aiakq.quantizers.numerics.clip import shares
from aiakq.quantizers.numerics.rounding import round_activations, rounded_weight
from aiakq.quantizers.rounders import gptq
from aiakq.quantizers.sample import MOST_TOKENS, ModuleCall, collect, output_error, trial_weights

#: The strengths that ``auto`` tries; None is no smoothing at all.
ALPHAS = (None, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
_SMALLEST = 1e-5


def quantize_block(work: BlockWork) -> None:
    """Smooth every pair of the block, then round every linear."""
    options = work.plan.options
    peaks = _peaks(work)
    chosen: list[tuple[Pair, Tensor]] = []
    for pair in work.pairs:
        if options.smooth_alpha == "auto":
            scales, remark = _searched(work, pair, peaks[pair.witness])
        else:
            scales = smoothing_scales(work, pair, peaks[pair.witness], work.plan.alpha)
            remark = {"alpha": work.plan.alpha}
        chosen.append((pair, scales))
        for name in pair.targets:
            work.remarks[name] = dict(remark)
    for pair, scales in chosen:
        columns = work.fold(pair, scales)
        for name in pair.targets:
            if name in peaks:
                peaks[name] = peaks[name] / columns
    stored = _stored_scales(work, peaks)
    if options.gptq:
        gptq.round_groups(work, input_scales=stored)
        return
    for name in work.linears:
        rounded = work.round_searched(name) if options.scale_search == "mse" else work.round_plainly(name)
        work.finish(name, *rounded, input_scale=stored.get(name))


def _peaks(work: BlockWork) -> dict[str, Tensor]:
    """The largest magnitude of each input channel, [K], of what pairs look at and of the first linear of each group."""
    largest: dict[str, Tensor] = {}

    def see(name: str) -> Callable[[Tensor], None]:
        def note(x: Tensor) -> None:
            peak = x.abs().amax(0)
            largest[name] = torch.maximum(largest[name], peak) if name in largest else peak

        return note

    first = {name: group[0] for group in work.groups for name in group}
    names = dict.fromkeys(first.get(pair.witness, pair.witness) for pair in work.pairs)
    if work.plan.spec.static_input:
        names |= dict.fromkeys(first.values())
    # One at least is looked at: inputs of which none is finite are an error, not a block without pairs.
    names = names or dict.fromkeys(list(first.values())[:1])
    if names:
        work.observe({name: see(name) for name in names})
    for name, shown in first.items():
        if shown in largest:
            largest[name] = largest[shown]
    return largest


def smoothing_scales(work: BlockWork, pair: Pair, activations: Tensor, alpha: float) -> Tensor:
    """The scale of every channel of the pair's source.

    activations [K], the largest magnitude of each input channel of the targets. Channels that are never used keep
    scale 1; channels without weight are brought to magnitude 1. Channels of one value head are tied by their maxima.
    """
    weights = torch.stack([work.weight(name).abs().amax(0) for name in pair.targets if name in work.linears]).amax(0)
    if pair.heads:
        activations = work.plan.heads.tie(activations, "max")
        weights = work.plan.heads.tie(weights, "max")
    scales = activations.clamp(min=_SMALLEST).pow(alpha) / weights.clamp(min=_SMALLEST).pow(1 - alpha)
    scales = torch.where(weights == 0, activations, scales)
    scales = torch.where(activations == 0, torch.ones_like(scales), scales)
    return scales.clamp(min=_SMALLEST)


# --- the search for a strength --------------------------------------------------------------------------------------


def _searched(work: BlockWork, pair: Pair, activations: Tensor) -> tuple[Tensor, dict[str, float | str]]:
    """The scales of the strength whose rounding changes the parent's output least, and what to say of it."""
    calls = collect(work, [pair.parent])[pair.parent]
    parent = work.block.get_submodule(pair.parent)
    best: tuple[float, float | None, Tensor] | None = None
    for alpha in ALPHAS:
        smoothed = smoothing_scales(work, pair, activations, 0.5 if alpha is None else alpha)
        scales = torch.ones_like(smoothed) if alpha is None else smoothed
        error = _w8a8_error(work, pair, scales, activations, parent, calls)
        if best is None or error < best[0] or best[0] != best[0]:
            best = error, alpha, scales
    assert best is not None
    return best[2], {"alpha": "none" if best[1] is None else best[1]}


def _w8a8_error(
    work: BlockWork, pair: Pair, scales: Tensor, activations: Tensor, parent: nn.Module, calls: list[ModuleCall]
) -> float:
    """The squared error of the parent's output with the targets computed in 8 bits after smoothing by ``scales``."""
    columns = work.plan.heads.spread(scales) if pair.heads else scales
    targets = work.tried(pair)
    static = (activations / columns).amax() / 127 if work.plan.spec.static_input else None
    weights = {}
    for name in targets:
        spec = work.spec(name)
        scaled = work.weight(name) * columns
        weights[name] = rounded_weight(scaled, spec.bits, spec.group_size, spec.symmetric, work.plan.scales)
    with trial_weights(work, weights), _rounded_inputs([work.linears[name] for name in targets], columns, static):
        return output_error(parent, calls)


@contextmanager
def _rounded_inputs(linears: list[nn.Linear], columns: Tensor, scale: Tensor | None) -> Iterator[None]:
    """While open, the linears see their inputs divided by ``columns`` and rounded to 8 bits."""

    def see(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (round_activations(args[0] / columns, scale), *args[1:])

    with watching(dict.fromkeys(linears, see)):
        yield


# --- stored activation scales ---------------------------------------------------------------------------------------


def _stored_scales(work: BlockWork, peaks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The activation scale of every linear that stores one: the largest input over 127, or less where that is better.

    Linears that share an input share their scale, because servers fuse them. A smaller scale clips the largest inputs;
    it is taken where the error of the outputs falls, ``sum_j |W_j|^2 (x_j - q_j)^2`` over a sample of tokens.
    """
    if not work.plan.spec.static_input:
        return {}
    importance: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}

    def see(name: str) -> Callable[[Tensor], None]:
        def note(x: Tensor) -> None:
            tried = [((round_activations(x, whole[name] * share) - x).square() @ importance[name]).sum()
                     for share in shares()]  # fmt: skip
            losses[name] = losses.get(name, 0) + torch.stack(tried).double()

        return note

    for group in work.groups:
        weights = [work.weight(name).square().sum(0) for name in group]
        importance[group[0]] = torch.stack(weights).sum(0)
        top = peaks[group[0]].amax() / 127
        whole[group[0]] = torch.where(top > 0, top, torch.ones_like(top)).to(torch.float32)
    if work.plan.options.scale_search != "minmax" and whole:
        work.observe({name: see(name) for name in whole}, work.some_batches(MOST_TOKENS))
    stored: dict[str, Tensor] = {}
    for group in work.groups:
        name = group[0]
        share = shares()[int(losses[name].argmin())] if name in losses else 1.0
        for member in group:
            stored[member] = (whole[name] * share).cpu()
            work.remarks.setdefault(member, {}).update(input_scale=float(stored[member]), clip=share)
    fallback = max(stored.values(), default=torch.tensor(1.0))
    return {name: stored.get(name, fallback) for name in work.linears}
