"""SmoothQuant: moves activation outliers into weights, so that both can be quantized to 8 bits.

Xiao et al. 2023 (arXiv:2211.10438), equation 4: ``s_j = max|X_j|^a / max|W_j|^(1-a)`` per input channel j; activations
are divided and weights multiplied by s, and the division is folded into the preceding norm or linear. The paper folds
the two inputs that follow a norm; here the inputs of the attention output and of the last MLP linear are folded as
well, into the value and the up projection, which costs nothing at run time. The strength a is the given one, that of
the model family, or (``auto``) for each smooth mapping the one whose 8-bit weights and activations change the output
of the surrounding module least. Activations get one dynamic scale per token, or a static one per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from aiakq.quantizers.block.decoder_block import BlockPart, DecoderBlock
from aiakq.quantizers.block.statistics import Statistic
from aiakq.quantizers.model.activations import SAMPLE_TOKENS
from aiakq.quantizers.model.groups import SmoothMapping, forward_pre_hooks
from aiakq.quantizers.model.module_calls import ModuleCall, output_error, replaced_weights
from aiakq.quantizers.recipe import Recipe, Transform, like_option
from aiakq.quantizers.workers.protocol import Task, Value
from aiakq.rounding.integers import round_activations, rounded_weight
from aiakq.rounding.ranges import range_fractions
from aiakq.spec import LayerSpec

#: Strengths tried by ``auto``; None is no smoothing.
ALPHAS = (None, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
#: Published smoothing strengths of model families; all others use the last entry.
FAMILY_ALPHAS = {
    "opt": 0.5,
    "bloom": 0.5,
    "glm": 0.75,
    "glm4": 0.75,
    "glm130": 0.75,
    "chatglm": 0.75,
    "falcon": 0.65,
    "": 0.8,
}
_SMALLEST = 1e-5


@dataclass(frozen=True)
class SmoothQuant(Transform):
    """SmoothQuant.

    alpha         strength, 0 to 1; ``auto`` searches it for every smooth mapping; None: the model family's usual value.
    scale_search  ``minmax``: static activation scales cover the largest input; ``mse``: also smaller ones, by the error
                  of the outputs. No effect without static scales.
    """

    alpha: float | str | None = like_option(None, "smooth_alpha")
    scale_search: str = like_option("mse", "scale_search")

    name = "smooth_quant"
    folds = True
    stores_input_scales = True

    def refusal(self, recipe: Recipe, scheme: LayerSpec) -> str | None:
        if scheme.is_float:
            return "it is for weights and activations that are integers"
        return None if scheme.activation_bits else "it only helps where activations are quantized too"

    def for_model(self, model_type: str) -> Self:
        if self.alpha is not None:
            return self
        return replace(self, alpha=FAMILY_ALPHAS.get(model_type, FAMILY_ALPHAS[""]))

    def apply(self, block: DecoderBlock, part: BlockPart) -> None:
        assert self.alpha is not None, "for_model fills it in"
        peaks = _peaks(block, part)
        chosen: list[tuple[SmoothMapping, Tensor]] = []
        searched = _searched_all(block, part, peaks) if isinstance(self.alpha, str) else []
        for number, mapping in enumerate(part.mappings):
            if isinstance(self.alpha, str):
                scales, alpha = searched[number]
            else:
                scales, alpha = smoothing_scales(block, mapping, peaks[mapping.probe], self.alpha), self.alpha
            chosen.append((mapping, scales))
            for name in mapping.balance_layers:
                block.result.remarks[name] = {"alpha": alpha}
        for mapping, scales in chosen:
            columns = block.fold(mapping, scales)
            for name in mapping.balance_layers:
                if name in peaks:
                    peaks[name] = peaks[name] / columns
        if block.plan.spec.static_input:
            block.input_scales |= _stored_scales(block, part, peaks, self.scale_search == "mse")


def _peaks(block: DecoderBlock, part: BlockPart) -> dict[str, Tensor]:
    """Return the largest magnitude of each input channel, [K], of the probes and of the first linear of each group."""
    first = {name: group[0] for group in part.groups for name in group}
    names = dict.fromkeys(first.get(mapping.probe, mapping.probe) for mapping in part.mappings)
    if block.plan.spec.static_input:
        names |= dict.fromkeys(first.values())
    # At least one is observed, so that inputs that are all non-finite raise an error.
    names = names or dict.fromkeys(list(first.values())[:1])
    peaks = block.inputs.gather({name: _peak(block, name) for name in names}) if names else {}
    largest = {name: totals[0] for name, (_, totals) in peaks.items()}
    for name, shown in first.items():
        if shown in largest:
            largest[name] = largest[shown]
    return largest


def _peak(block: DecoderBlock, name: str) -> Statistic:
    """Return the statistic of the largest magnitude of each input channel of a linear or router, [K]."""
    weight = block.module.get_submodule(name).weight
    assert isinstance(weight, Tensor)

    def add(totals: list[Tensor], rows: Tensor, batch: int) -> None:
        torch.maximum(totals[0], rows.abs().amax(0), out=totals[0])

    return Statistic(lambda: [torch.zeros(weight.shape[1], device=weight.device)], add, maximum=True)


def smoothing_scales(block: DecoderBlock, mapping: SmoothMapping, activations: Tensor, alpha: float) -> Tensor:
    """Return the scale of every channel of the mapping's smooth layer.

    activations [K], the largest magnitude of each input channel of the balance layers. Channels that are never used
    keep scale 1; channels without weight are scaled to magnitude 1. Channels of one value head are tied by their
    maxima.
    """
    weights = torch.stack(
        [block.weight(name).abs().amax(0) for name in mapping.balance_layers if name in block.linears]
    ).amax(0)
    if mapping.heads:
        activations = block.plan.heads.tie(activations, "max")
        weights = block.plan.heads.tie(weights, "max")
    scales = activations.clamp(min=_SMALLEST).pow(alpha) / weights.clamp(min=_SMALLEST).pow(1 - alpha)
    scales = torch.where(weights == 0, activations, scales)
    scales = torch.where(activations == 0, torch.ones_like(scales), scales)
    return scales.clamp(min=_SMALLEST)


# --- the search for a strength --------------------------------------------------------------------------------------


def _searched_all(
    block: DecoderBlock, part: BlockPart, peaks: Mapping[str, Tensor]
) -> list[tuple[Tensor, float | str]]:
    """``_searched`` for every mapping, distributed over the workers."""
    tasks = []
    for mapping in part.mappings:

        def run(mapping: SmoothMapping = mapping) -> list[Value]:
            return list(_searched(block, mapping, peaks[mapping.probe]))

        tasks.append(Task(sum(block.weight(name).numel() for name in block.searched_layers(mapping)), run))
    results = []
    for scales, alpha in block.workers.share(tasks):
        assert isinstance(scales, Tensor) and isinstance(alpha, (float, str))
        results.append((scales, alpha))
    return results


def _searched(block: DecoderBlock, mapping: SmoothMapping, activations: Tensor) -> tuple[Tensor, float | str]:
    """Return the scales of the strength whose rounding changes the parent's output least, and the strength."""
    calls = block.inputs.record_calls([mapping.parent])[mapping.parent]
    parent = block.module.get_submodule(mapping.parent)
    best: tuple[float, float | None, Tensor] | None = None
    for alpha in ALPHAS:
        smoothed = smoothing_scales(block, mapping, activations, 0.5 if alpha is None else alpha)
        scales = torch.ones_like(smoothed) if alpha is None else smoothed
        error = _w8a8_error(block, mapping, scales, activations, parent, calls)
        if best is None or error < best[0] or best[0] != best[0]:
            best = error, alpha, scales
    assert best is not None
    return best[2], "none" if best[1] is None else best[1]


def _w8a8_error(
    block: DecoderBlock,
    mapping: SmoothMapping,
    scales: Tensor,
    activations: Tensor,
    parent: nn.Module,
    calls: list[ModuleCall],
) -> float:
    """Return the squared error of the parent's output with 8-bit balance layers after smoothing by ``scales``."""
    columns = block.plan.heads.spread(scales) if mapping.heads else scales
    names = block.searched_layers(mapping)
    static = (activations / columns).amax() / 127 if block.plan.spec.static_input else None
    weights = {}
    for name in names:
        spec = block.spec(name)
        scaled = block.weight(name) * columns
        weights[name] = rounded_weight(scaled, spec.bits, spec.group_size, spec.symmetric, block.plan.scales)
    with (
        replaced_weights(block.linears, weights),
        _rounded_inputs([block.linears[name] for name in names], columns, static),
    ):
        return output_error(parent, calls)


@contextmanager
def _rounded_inputs(linears: list[nn.Linear], columns: Tensor, scale: Tensor | None) -> Iterator[None]:
    """Divide the linears' inputs by ``columns`` and round them to 8 bits while the context is open."""

    def see(module: nn.Module, args: tuple[Any, ...]) -> tuple[object, ...]:
        return (round_activations(args[0] / columns, scale), *args[1:])

    with forward_pre_hooks(dict.fromkeys(linears, see)):
        yield


# --- static activation scales ---------------------------------------------------------------------------------------


def _stored_scales(
    block: DecoderBlock, part: BlockPart, peaks: Mapping[str, Tensor], search: bool
) -> dict[str, Tensor]:
    """Return the static activation scale of every linear that has one: the largest input / 127, or less if better.

    Linears that share an input share their scale, because servers fuse them. A smaller scale clips the largest inputs;
    it is used if it lowers the error of the outputs, ``sum_j |W_j|^2 (x_j - q_j)^2``, over a sample of tokens.
    """
    importance: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}

    def see(name: str) -> Callable[[Tensor], None]:
        def note(x: Tensor) -> None:
            tried = [((round_activations(x, whole[name] * fraction) - x).square() @ importance[name]).sum()
                     for fraction in range_fractions()]  # fmt: skip
            losses[name] = losses.get(name, 0) + torch.stack(tried).double()

        return note

    for group in part.groups:
        weights = [block.weight(name).square().sum(0) for name in group]
        importance[group[0]] = torch.stack(weights).sum(0)
        top = peaks[group[0]].amax() / 127
        whole[group[0]] = torch.where(top > 0, top, torch.ones_like(top)).to(torch.float32)
    if search and whole:
        block.inputs.observe({name: see(name) for name in whole}, block.inputs.activations.first_batches(SAMPLE_TOKENS))
    stored: dict[str, Tensor] = {}
    for group in part.groups:
        name = group[0]
        fraction = range_fractions()[int(losses[name].argmin())] if name in losses else 1.0
        for member in group:
            stored[member] = (whole[name] * fraction).cpu()
            block.result.remark(member, input_scale=float(stored[member]), clip=fraction)
    fallback = max(stored.values(), default=torch.tensor(1.0))
    return {name: stored.get(name, fallback) for name in part.linears}
