"""AWQ: scales up input channels with large activations before rounding, and searches clipping ranges.

Lin et al. 2023 (arXiv:2306.00978). For each smooth mapping a grid of scales between "follow the activations" and
"follow the weights" is searched, and the one whose rounded weights change the output of the surrounding module least is
folded. Then the range of each group of each row may be clipped, if that lowers the error of the group's output. The
identity is among the candidates of both searches. Differences from the published code:

- Both published kinds of scales are tried, with and without the statistics of the weights, and the ends of the grid.
- The attention output is scaled under grouped-query attention as well, with one scale per shared value channel.
- A block that has a larger error than with RTN, on a sample of tokens, is quantized with RTN.
- Clipping uses the inputs of all calibration tokens instead of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aiakq.quantizers.block.decoder_block import BlockPart, DecoderBlock
from aiakq.quantizers.block.statistics import Statistic
from aiakq.quantizers.model.groups import SmoothMapping
from aiakq.quantizers.model.module_calls import ModuleCall, output_error, replaced_weights
from aiakq.quantizers.numerics.sums import total
from aiakq.quantizers.recipe import Recipe, Transform
from aiakq.quantizers.workers.protocol import Task, Value
from aiakq.rounding.integers import grouped, rounded_weight
from aiakq.rounding.ranges import best_clip
from aiakq.spec import LayerSpec

GRID = 20
#: Clipping queries and keys disturbs their product, so they are not clipped (as published).
_NEVER_CLIPPED = ("q_proj", "k_proj")


@dataclass(frozen=True)
class Awq(Transform):
    """Activation-aware scales.

    clip  whether to clip the ranges of groups as well; only before a rounder that respects clipping.
    """

    clip: bool = True

    name = "awq"
    folds = True
    by_parts = True

    @property
    def clips(self) -> bool:
        return self.clip

    def refusal(self, recipe: Recipe, scheme: LayerSpec) -> str | None:
        if scheme.is_float:
            return "its search rounds weights to integers"
        if scheme.activation_bits:
            return "its search assumes activations of 16 bits"
        if self.clip and not recipe.rounder.takes_clip:
            return f"{recipe.rounder.name} chooses the ranges itself; use awq with clip: false"
        return None

    def apply(self, block: DecoderBlock, part: BlockPart) -> None:
        statistics = _Statistics(block, part, self.clip)
        _fold_part(block, statistics)
        if self.clip:
            _clip_part(block, part, statistics)

    def guard(self, block: DecoderBlock) -> Callable[[], str | None]:
        """Compare the error of the block's output on a sample of tokens with that of RTN."""
        calls = block.inputs.record_calls([""])[""]
        nearest = _once(block, lambda: _nearest_error(block, calls))

        def worse() -> str | None:
            error = _once(block, lambda: output_error(block.module, calls))
            # Written so that a NaN error loses.
            if not calls or error <= nearest:
                return None
            return f"scales and clipping gave an error of {error:.3g} instead of {nearest:.3g}"

        return worse


def _once(block: DecoderBlock, compute: Callable[[], float]) -> float:
    """Return a number that one of the workers computes for all."""
    (result,) = block.workers.broadcast(0, lambda: [compute()])
    assert isinstance(result, float)
    return result


def _nearest_error(block: DecoderBlock, calls: list[ModuleCall]) -> float:
    """Return the squared error of the block's output with every linear rounded to nearest."""
    if not calls:
        return 0.0
    weights = {name: rounded(block, name, block.weight(name)) for name in block.linears}
    with replaced_weights(block.linears, weights):
        return output_error(block.module, calls)


def rounded(block: DecoderBlock, name: str, weight: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return a weight [N, K] after RTN, with its columns multiplied by ``columns`` [K] during the rounding."""
    spec = block.spec(name)
    return rounded_weight(weight, spec.bits, spec.group_size, spec.symmetric, block.plan.scales, columns)


class _Statistics:
    """Statistics of the inputs of a part's linears: mean magnitudes, and for clipping the second moments of groups."""

    def __init__(self, block: DecoderBlock, part: BlockPart, clip: bool) -> None:
        self.block = block
        self.group_of = {name: group for group in part.groups for name in group}
        traced = {name for group in block.groups for name in group}
        self.mappings = [mapping for mapping in part.mappings if traced.intersection(mapping.balance_layers)]
        # For a scale shared by experts, which see few tokens each, the router's inputs are measured.
        self.probes = {mapping: self._first(mapping.probe) for mapping in self.mappings}
        self.means: dict[str, Tensor] = {}
        self.moments: dict[tuple[str, int], Tensor] = {}
        self.clip = clip
        sizes = {first: self._sizes(first) for first in dict.fromkeys(group[0] for group in part.groups)}
        names = dict.fromkeys([*self.probes.values(), *(first for first in sizes if sizes[first])])
        statistics = {name: self._statistic(name, sizes.get(name, [])) for name in names}
        gathered = block.inputs.gather(statistics) if names else {}
        for name, (rows, (magnitudes, *moments)) in gathered.items():
            self.means[name] = magnitudes / rows
            for size, moment in zip(sizes.get(name, []), moments, strict=True):
                self.moments[name, size] = moment.div_(rows)

    def _statistic(self, name: str, sizes: list[int]) -> Statistic:
        """Return the sums of the magnitudes of a linear's inputs, [K], and of the products inside groups, [K / G, G,
        G].
        """
        weight = self.block.module.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        k, device = weight.shape[1], weight.device

        def start() -> list[Tensor]:
            moments = [torch.zeros(k // size, size, size, device=device) for size in sizes]
            return [torch.zeros(k, device=device), *moments]

        def add(totals: list[Tensor], x: Tensor, batch: int) -> None:
            totals[0] += x.abs().sum(0)
            for size, moment in zip(sizes, totals[1:], strict=True):
                groups = x.unflatten(1, (-1, size)).transpose(0, 1)  # [K / G, T, G]
                moment.baddbmm_(groups.transpose(1, 2), groups)

        return Statistic(start, add)

    def _first(self, name: str) -> str:
        return self.group_of[name][0] if name in self.group_of else name

    def _sizes(self, first: str) -> list[int]:
        """Return the group sizes of those linears whose ranges may be clipped."""
        if not self.clip:
            return []
        return sorted({self._size(name) for name in self.group_of[first] if not name.endswith(_NEVER_CLIPPED)})

    def _size(self, name: str) -> int:
        size = self.block.spec(name).group_size
        return self.block.linears[name].in_features if size == -1 else size

    def divide(self, names: Iterable[str], columns: Tensor) -> None:
        """Account for a folded scale that divides the inputs of some linears."""
        folded = {self.group_of[name][0] for name in names if name in self.group_of}
        for (name, size), moment in self.moments.items():
            if name in folded:
                parts = columns.unflatten(0, (-1, size))
                moment.div_(parts.unsqueeze(1)).div_(parts.unsqueeze(2))

    def best_clip(self, name: str) -> Tensor | None:
        """Return the clipping magnitudes of a linear, [N, K / G]; None for no clipping."""
        moment = self.moments.get((self._first(name), self._size(name)))
        if moment is None or name.endswith(_NEVER_CLIPPED):
            return None
        spec = self.block.spec(name)
        return best_clip(
            self.block.weight(name), moment, spec.bits, spec.group_size, spec.symmetric, self.block.plan.scales
        )


# --- scales ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """Scales ``x^r / w^(1-r)``, or ``x^r`` without ``weights``; r is in steps of 1 / GRID. None means no scales."""

    step: int
    weights: bool

    def scales(self, activations: Tensor, relative: Tensor) -> Tensor:
        """Return the normalized scales [channels]."""
        ratio = self.step / GRID
        scales = activations.pow(ratio)
        if self.weights:
            scales = scales / (relative.pow(1 - ratio) + 1e-4)
        scales = scales.clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        return torch.where(torch.isfinite(scales) & (scales > 0), scales, torch.ones_like(scales))


#: No scales: ``x^0``.
IDENTITY = Candidate(0, weights=False)


def coarse_grid() -> Iterator[Candidate]:
    """Yield the identity, then every second point of the published grid, both kinds, from one end to the other."""
    yield IDENTITY
    for weights in (True, False):
        for step in range(0, GRID + 1, 2):
            if weights or step:
                yield Candidate(step, weights)


def finer(best: Candidate) -> Iterator[Candidate]:
    """Yield the grid points adjacent to one of the coarse grid."""
    for step in (best.step - 1, best.step + 1):
        if 0 <= step <= GRID:
            yield Candidate(step, best.weights)


def best_scales(
    activations: Tensor, relative: Tensor, loss: Callable[[Tensor], float]
) -> tuple[Candidate, Tensor, float, float]:
    """Return the candidate with the lowest loss, its scales [channels], its loss, and the loss without scales."""
    tried: dict[Candidate, float] = {}

    def best(candidates: Iterable[Candidate]) -> Candidate:
        for candidate in candidates:
            value = loss(candidate.scales(activations, relative))
            tried[candidate] = value if value == value else float("inf")
        return min(tried, key=tried.__getitem__)  # the first of equals, so the identity wins ties

    chosen = best(finer(best(coarse_grid())))
    return chosen, chosen.scales(activations, relative), tried[chosen], tried[IDENTITY]


def _fold_part(block: DecoderBlock, statistics: _Statistics) -> None:
    """Search the scales of every mapping with the block in its current state, then fold them all."""
    calls = block.inputs.record_calls(dict.fromkeys(mapping.parent for mapping in statistics.mappings))
    tasks = []
    for mapping in statistics.mappings:
        cost = sum(block.weight(name).numel() for name in block.searched_layers(mapping))
        tasks.append(Task(cost, partial(_search, block, mapping, statistics, calls[mapping.parent])))
    chosen: list[tuple[SmoothMapping, Tensor]] = []
    for mapping, result in zip(statistics.mappings, block.workers.share(tasks), strict=True):
        kind, ratio, gain, scales = result
        assert isinstance(kind, str) and isinstance(ratio, float) and isinstance(gain, float)
        assert isinstance(scales, Tensor)
        for name in block.searched_layers(mapping):
            block.result.remarks[name] = {"awq": kind, "r": ratio, "gain": gain}
        chosen.append((mapping, scales))
    calls.clear()
    for mapping, scales in chosen:
        statistics.divide(mapping.balance_layers, block.fold(mapping, scales))


def _search(
    block: DecoderBlock, mapping: SmoothMapping, statistics: _Statistics, calls: list[ModuleCall]
) -> list[Value]:
    """Return the best scales of a mapping: their kind, r and gain for the report, and the scales [channels]."""
    names = block.searched_layers(mapping)
    activations = statistics.means[statistics.probes[mapping]]
    relative = _relative(block, names)
    heads = block.plan.heads
    if mapping.heads:
        activations, relative = heads.tie(activations, "mean"), heads.tie(relative, "mean")
    best, scales, value, identity = best_scales(activations, relative, _loss(block, mapping, names, calls))
    kind = "no scale" if best == IDENTITY else "x^r/w^(1-r)" if best.weights else "x^r"
    return [kind, best.step / GRID, 1 - value / identity if identity else 0.0, scales]


def _clip_part(block: DecoderBlock, part: BlockPart, statistics: _Statistics) -> None:
    """Search the clipping magnitudes of every linear of a part."""
    tasks = []
    for name in part.linears:

        def run(name: str = name) -> list[Value]:
            return [statistics.best_clip(name)]

        tasks.append(Task(block.weight(name).numel(), run))
    for name, (clip,) in zip(part.linears, block.workers.share(tasks), strict=True):
        if isinstance(clip, Tensor):
            block.clip[name] = clip


def _relative(block: DecoderBlock, names: list[str]) -> Tensor:
    """Return the magnitude of each input's weights relative to their groups, in [0, 1], averaged over rows: [K]."""
    summed, rows = torch.zeros(block.weight(names[0]).shape[1], device=block.weight(names[0]).device), 0
    for name in names:
        groups = grouped(block.weight(name), block.spec(name).group_size).abs()
        summed += groups.div_(groups.amax(-1, keepdim=True) + 1e-6).flatten(1).sum(0)
        rows += len(groups)
    return summed / rows


def _loss(
    block: DecoderBlock, mapping: SmoothMapping, names: list[str], calls: list[ModuleCall]
) -> Callable[[Tensor], float]:
    """Return the squared error of the parent's output as a function of the scales of the mapping's channels."""
    heads = block.plan.heads

    def candidate(name: str, scales: Tensor) -> Tensor:
        return rounded(block, name, block.weight(name), heads.spread(scales) if mapping.heads else scales)

    if mapping.parent in block.linears:
        weight = block.weight(mapping.parent)
        x = torch.cat([call.args[0].reshape(-1, weight.shape[1]) for call in calls]) if calls else weight[:0]
        x = x.clone()
        moment = x.T @ x if len(x) > weight.shape[1] else None

        def alone(scales: Tensor) -> float:
            gap = candidate(mapping.parent, scales).sub_(weight)
            if moment is not None:
                return total((gap @ moment).mul_(gap))
            return total((x @ gap.T).square_())

        return alone
    parent = block.module.get_submodule(mapping.parent)

    def through(scales: Tensor) -> float:
        with replaced_weights(block.linears, {name: candidate(name, scales) for name in names}):
            return output_error(parent, calls)

    return through
