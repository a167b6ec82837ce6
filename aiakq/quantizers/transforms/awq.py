"""awq: protect the inputs that matter by scaling them up before rounding, then cut ranges where that pays.

Lin et al. 2023 (arXiv:2306.00978). For each place where a scale can be folded (pairs.py), a grid of scales between
"follow the activations" and "follow the weights" is tried, and the one whose rounded weights change the output of the
surrounding module least is folded. Then each group of each row may have its range cut, if that lowers the error of the
group's output. Doing nothing is among the candidates of both searches. What differs from the published code:

- Both published kinds of scales are tried, with and without the statistics of the weights, and the ends of the grid.
- The attention output is scaled under grouped-query attention as well, with one scale per shared value channel.
- A block that comes out worse than rounded plainly, on a sample of tokens, is rounded plainly.
- Ranges are cut by the inputs of all calibration tokens, not of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.quantizers.block import BlockWork, Part
from aiakq.quantizers.model.groups import Pair
from aiakq.quantizers.numerics.clip import best_limits
from aiakq.quantizers.numerics.rounding import grouped, rounded_weight
from aiakq.quantizers.sample import ModuleCall, collect, output_error, trial_weights

GRID = 20
#: Cutting ranges of queries and keys disturbs their product, so these are left whole (as published).
_NEVER_CLIPPED = ("q_proj", "k_proj")


def quantize_block(work: BlockWork) -> None:
    """Scale, cut and round the linears of the block; those of experts a few experts at a time."""
    calls = collect(work, [""])[""]
    before = {
        name: parameter.data.to(work.plan.storage, copy=True) for name, parameter in work.block.named_parameters()
    }
    plain = _plain_error(work, calls)
    for part in work.parts():
        statistics = _Statistics(work, part)
        _fold_part(work, part, statistics)
        for name in part.linears:
            work.finish(name, *work.round_plainly(name, limits=statistics.limits(name)))
    error = output_error(work.block, calls)
    # Written so that an error that is no number loses.
    if calls and not error <= plain:
        work.start_over(before)
        for name in work.linears:
            work.finish(name, *work.round_plainly(name))
            work.remarks[name] = {"awq": "kept plain rounding"}
        found = f"an error of {error:.3g} instead of {plain:.3g}"
        work.warnings.append(f"{work.prefix} was rounded plainly: scales and cut ranges gave {found} on a sample.")


def fold_scales(work: BlockWork) -> dict[str, Tensor]:
    """Only find and fold the scales; returns what each target's columns were multiplied by, [K], by name."""
    columns: dict[str, Tensor] = {}
    for part in work.parts():
        columns |= _fold_part(work, part, _Statistics(work, part, only_means=True))
    return columns


def _plain_error(work: BlockWork, calls: list[ModuleCall]) -> float:
    """The error of the block's output with every linear rounded plainly."""
    if not calls:
        return 0.0
    with trial_weights(work, {name: rounded(work, name, work.weight(name)) for name in work.linears}):
        return output_error(work.block, calls)


def rounded(work: BlockWork, name: str, weight: Tensor, columns: Tensor | None = None) -> Tensor:
    """What plain rounding leaves of a linear's weight [N, K], rounded after multiplying its columns."""
    spec = work.spec(name)
    return rounded_weight(weight, spec.bits, spec.group_size, spec.symmetric, work.plan.scales, columns)


class _Statistics:
    """What is known of the inputs of a part's linears: mean magnitudes, and second moments inside groups."""

    def __init__(self, work: BlockWork, part: Part, only_means: bool = False) -> None:
        self.work = work
        self.group_of = {name: group for group in part.groups for name in group}
        self.pairs = [
            pair for pair in part.pairs if any(name in group for group in work.groups for name in pair.targets)
        ]
        # Where a scale is shared by experts, which see a few tokens each, a router shows what they have in common.
        self.shown = {pair: self._first(pair.witness) for pair in self.pairs}
        self.means: dict[str, Tensor] = {}
        self.moments: dict[tuple[str, int], Tensor] = {}
        self.search = not only_means and work.plan.options.scale_search != "minmax"
        sizes = {first: self._sizes(first) for first in dict.fromkeys(group[0] for group in part.groups)}
        for first, found in sizes.items():
            for size in found:
                k = work.linears[first].in_features
                device = work.weight(first).device
                self.moments[first, size] = torch.zeros(k // size, size, size, device=device)
        rows: dict[str, int] = {}

        def see(name: str) -> Callable[[Tensor], None]:
            def note(x: Tensor) -> None:
                self.means[name] = self.means.get(name, 0) + x.abs().sum(0)
                rows[name] = rows.get(name, 0) + len(x)
                for size in sizes.get(name, ()):
                    groups = x.unflatten(1, (-1, size)).transpose(0, 1)  # [K / G, T, G]
                    self.moments[name, size].baddbmm_(groups.transpose(1, 2), groups)

            return note

        names = dict.fromkeys([*self.shown.values(), *(first for first in sizes if sizes[first])])
        if names:
            work.observe({name: see(name) for name in names})
        self.means = {name: total / rows[name] for name, total in self.means.items()}
        for name, size in self.moments:
            self.moments[name, size] /= rows[name]

    def _first(self, name: str) -> str:
        return self.group_of[name][0] if name in self.group_of else name

    def _sizes(self, first: str) -> set[int]:
        """The group sizes that occur among the linears whose ranges may be cut."""
        if not self.search:
            return set()
        return {self._size(name) for name in self.group_of[first] if not name.endswith(_NEVER_CLIPPED)}

    def _size(self, name: str) -> int:
        size = self.work.spec(name).group_size
        return self.work.linears[name].in_features if size == -1 else size

    def divide(self, names: Iterable[str], columns: Tensor) -> None:
        """The inputs of some linears were divided by a folded scale."""
        folded = {self.group_of[name][0] for name in names if name in self.group_of}
        for (name, size), moment in self.moments.items():
            if name in folded:
                parts = columns.unflatten(0, (-1, size))
                moment.div_(parts.unsqueeze(1)).div_(parts.unsqueeze(2))

    def limits(self, name: str) -> Tensor | None:
        """Where the ranges of a linear are cut, [N, K / G]; None for whole ranges."""
        moment = self.moments.get((self._first(name), self._size(name)))
        if moment is None or name.endswith(_NEVER_CLIPPED):
            return None
        spec = self.work.spec(name)
        return best_limits(
            self.work.weight(name), moment, spec.bits, spec.group_size, spec.symmetric, self.work.plan.scales
        )


# --- scales ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """Scales ``x^r / w^(1-r)``, or ``x^r`` without ``weights``; r is in steps of a GRID-th. None is no scale at all."""

    step: int
    weights: bool

    def scales(self, activations: Tensor, relative: Tensor) -> Tensor:
        """The normalized scales [channels]."""
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
    """Identity, then every second point of the published grid, both kinds, from one end to the other."""
    yield IDENTITY
    for weights in (True, False):
        for step in range(0, GRID + 1, 2):
            if weights or step:
                yield Candidate(step, weights)


def finer(best: Candidate) -> Iterator[Candidate]:
    """The points of the grid next to one of the coarse grid."""
    for step in (best.step - 1, best.step + 1):
        if 0 <= step <= GRID:
            yield Candidate(step, best.weights)


def best_scales(
    activations: Tensor, relative: Tensor, loss: Callable[[Tensor], float]
) -> tuple[Candidate, Tensor, float, float]:
    """The candidate with the lowest loss, its scales [channels], its loss, and that of doing nothing."""
    tried: dict[Candidate, float] = {}

    def best(candidates: Iterable[Candidate]) -> Candidate:
        for candidate in candidates:
            value = loss(candidate.scales(activations, relative))
            tried[candidate] = value if value == value else float("inf")
        return min(tried, key=tried.__getitem__)  # the first of equals, so identity before all

    chosen = best(finer(best(coarse_grid())))
    return chosen, chosen.scales(activations, relative), tried[chosen], tried[IDENTITY]


def _fold_part(work: BlockWork, part: Part, statistics: _Statistics) -> dict[str, Tensor]:
    """Find the scales of every pair with the block as it is, then fold them all; returns columns by target."""
    calls = collect(work, dict.fromkeys(pair.parent for pair in statistics.pairs))
    chosen: list[tuple[Pair, Tensor]] = []
    for pair in statistics.pairs:
        targets = work.tried(pair)
        activations = statistics.means[statistics.shown[pair]]
        relative = _relative(work, targets)
        heads = work.plan.heads
        if pair.heads:
            activations, relative = heads.tie(activations, "mean"), heads.tie(relative, "mean")
        loss = _loss(work, pair, targets, calls[pair.parent])
        best, scales, value, identity = best_scales(activations, relative, loss)
        for name in targets:
            kind = "no scale" if best == IDENTITY else "x^r/w^(1-r)" if best.weights else "x^r"
            work.remarks[name] = {"awq": kind, "r": best.step / GRID, "gain": 1 - value / identity if identity else 0.0}
        chosen.append((pair, scales))
    calls.clear()
    columns: dict[str, Tensor] = {}
    for pair, scales in chosen:
        columns |= dict.fromkeys(pair.targets, work.fold(pair, scales))
        statistics.divide(pair.targets, columns[pair.targets[0]])
    return columns


def _relative(work: BlockWork, targets: list[str]) -> Tensor:
    """How large each input's weights are in their groups, between 0 and 1, on average over rows: [K]."""
    total, rows = torch.zeros(work.weight(targets[0]).shape[1], device=work.weight(targets[0]).device), 0
    for name in targets:
        groups = grouped(work.weight(name), work.spec(name).group_size).abs()
        total += groups.div_(groups.amax(-1, keepdim=True) + 1e-6).flatten(1).sum(0)
        rows += len(groups)
    return total / rows


def _loss(work: BlockWork, pair: Pair, targets: list[str], calls: list[ModuleCall]) -> Callable[[Tensor], float]:
    """The squared error of the parent's output, as a function of the scales of the pair's channels."""
    heads = work.plan.heads

    def trial(name: str, scales: Tensor) -> Tensor:
        return rounded(work, name, work.weight(name), heads.spread(scales) if pair.heads else scales)

    if pair.parent in work.linears:
        weight = work.weight(pair.parent)
        x = torch.cat([call.args[0].reshape(-1, weight.shape[1]) for call in calls]) if calls else weight[:0]
        x = x.clone()
        moment = x.T @ x if len(x) > weight.shape[1] else None

        def alone(scales: Tensor) -> float:
            gap = trial(pair.parent, scales).sub_(weight)
            if moment is not None:
                return float((gap @ moment).mul_(gap).sum())
            return float((x @ gap.T).square_().sum())

        return alone
    parent = work.block.get_submodule(pair.parent)

    def through(scales: Tensor) -> float:
        with trial_weights(work, {name: trial(name, scales) for name in targets}):
            return output_error(parent, calls)

    return through
