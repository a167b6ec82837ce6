"""BlockWork: one decoder block on the bench, with its calibration inputs and what a method may do with it.

A method watches inputs (``gram``, ``observe``), may fold scales, and hands over every linear once with ``finish``,
which puts the rounded weight into the block so that everything after it sees what it will see when served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.errors import error
from aiakq.kernels.types import QWeight
from aiakq.quantizers.model.activations import Activations
from aiakq.quantizers.model.experts import Experts, ExpertTokens, count_tokens, expert, experts_of, in_stages, place
from aiakq.quantizers.model.groups import Heads, Pair, block_linears, fold, watching
from aiakq.quantizers.model.replay import Replay, add_second_moment, mirror
from aiakq.quantizers.model.source import take_weight
from aiakq.quantizers.numerics.clip import round_searched
from aiakq.quantizers.numerics.output_error import Comparison
from aiakq.quantizers.numerics.rounding import Rounding, round_weight
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.report.magnitudes import Magnitudes, largest
from aiakq.spec import LayerSpec, QuantSpec

#: Tokens whose outputs are compared to report a layer's error; more would not change the second digit.
ERROR_TOKENS = 4096
#: Experts whose rounding decides about a scale that all of them share.
TRIED_EXPERTS = 4


class _Enough(Exception):
    pass


@dataclass(frozen=True)
class Plan:
    """What is the same for every block.

    storage  the dtype of what is not quantized in the output (norms, biases).
    scales   the dtype scales are stored in.
    """

    options: QuantizeOptions
    spec: QuantSpec
    storage: torch.dtype
    scales: torch.dtype
    heads: Heads
    alpha: float = 0.0

    @property
    def needs_original(self) -> bool:
        """Whether blocks get ``BlockWork.original``."""
        return self.options.gptaq


@dataclass(frozen=True)
class Part:
    """Some of a block's linears, with the groups they are in and the pairs whose source is among them (or a norm)."""

    linears: list[str]
    groups: list[tuple[str, ...]]
    pairs: list[Pair]


@dataclass
class Original:
    """The unquantized model beside the work: a copy of the block as it was, and what reaches it in that model."""

    block: nn.Module
    inputs: Activations


@dataclass
class BlockWork:
    """One block. ``linears`` are those to quantize, by name inside the block; ``groups`` are they in the groups that
    share an input, in the order they run.

    finished  name inside the block -> its quantized weight.
    changed   name inside the block -> a tensor that is not quantized but was changed by folding.
    errors    name inside the block -> relative error of the output, ``||y_q - y|| / ||y||``, without bias.
    dropped   tokens left out of the statistics because an input was not finite.
    original  for methods that look at the unquantized model; None unless the plan asks for it.
    pairs     where scales may be folded, at least one target being quantized; empty for methods that do not.
    experts   what the experts of the block, if it has any, are calibrated on.
    remarks   name inside the block -> what a method says of how it chose that linear's numbers, for the report.
    """

    block: nn.Module
    index: int
    prefix: str
    plan: Plan
    groups: list[tuple[str, ...]]
    inputs: Activations
    warnings: list[str]
    original: Original | None = None
    pairs: tuple[Pair, ...] = ()
    finished: dict[str, QWeight] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    dropped: int = 0
    magnitudes: Magnitudes = field(default_factory=Magnitudes)
    remarks: dict[str, dict[str, float | str]] = field(default_factory=dict)
    _reference: dict[str, Tensor] = field(default_factory=dict)
    _rounded: tuple[str, ...] = ()
    _ahead: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replay = Replay(self.block, self.index, self.inputs)
        self.linears: dict[str, nn.Linear] = {}
        self._specs: dict[str, QuantSpec] = {}
        for name, linear in block_linears(self.block).items():
            spec = self.plan.spec.for_layer(f"{self.prefix}.{name}")
            if spec is not None:
                self.linears[name], self._specs[name] = linear, spec
                self.magnitudes.weight_before[name] = largest(linear.weight.data)
        kept = [tuple(name for name in group if name in self.linears) for group in self.groups]
        self.groups = [group for group in kept if group]
        self.pairs = tuple(pair for pair in self.pairs if any(name in self.linears for name in pair.targets))
        self.experts = [self._meet(name, mixture) for name, mixture in experts_of(self.block).items()]

    def _meet(self, name: str, mixture: Experts) -> ExpertTokens:
        """Count the tokens of each expert of a mixture, and have those with too few see all, or none."""

        def run() -> None:
            with torch.inference_mode():
                for batch in range(len(self.inputs.hidden)):
                    self.inputs.run(self.block, self.index, batch)

        seen = count_tokens(f"{self.prefix}.{name}", mixture, run, self.inputs.tokens)
        mixture.everywhere = frozenset(seen.everywhere)
        rounded = tuple(f"{name}.{number}." for number in seen.rounded)
        self.groups = [group for group in self.groups if not group[0].startswith(rounded)]
        self.pairs = tuple(pair for pair in self.pairs if not pair.source.startswith(rounded))
        self._rounded += rounded
        self.groups = in_stages(self.groups, mixture, name)
        return seen

    def spec(self, name: str) -> QuantSpec:
        """How the linear ``name`` is to be stored."""
        return self._specs[name]

    def alike(self, group: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The linears of a group in parts that are stored in the same way."""
        parts: dict[LayerSpec, list[str]] = {}
        for name in group:
            parts.setdefault(self._specs[name].layer, []).append(name)
        return [tuple(names) for names in parts.values()]

    def round_plainly(self, name: str, weight: Tensor | None = None, limits: Tensor | None = None) -> Rounding:
        """``weight`` (the linear's own if None), rounded as this linear is to be stored."""
        spec = self._specs[name]
        weight = self.weight(name) if weight is None else weight
        return round_weight(weight, spec.bits, spec.group_size, spec.symmetric, self.plan.scales, limits)

    def round_searched(self, name: str) -> Rounding:
        """The linear's weight, rounded as it is to be stored, in ranges searched by the error of the weights."""
        spec = self._specs[name]
        return round_searched(self.weight(name), spec.bits, spec.group_size, spec.symmetric, self.plan.scales)

    # --- looking at inputs ----------------------------------------------------------------------------------------

    def observe(
        self, see: Mapping[str, Callable[[Tensor], None]], batches: Iterable[int] | None = None, keep: bool = False
    ) -> None:
        """Run the block over calibration batches and show the inputs of some linears (or routers).

        ``see[name]`` is called per batch with the finite rows of that linear's input, [T, K] float32. The pass ends
        as soon as all of them were seen. ``keep`` says that everything before these linears is finished, so that later
        passes need not compute it again (replay.py). Raises ``not_finite`` if a linear saw nothing finite in the whole
        run.
        """
        kept = dict.fromkeys(see, 0)
        lost = dict.fromkeys(see, 0)
        sizes: dict[str, float] = {}
        measured = frozenset(self.some_batches(ERROR_TOKENS))

        def take(batch: int, name: str, x: Tensor) -> None:
            if keep:
                self.replay.keep(name, batch, x)
            rows = x.reshape(-1, x.shape[-1])
            # One sum tells whether anything is wrong; only then look row by row.
            if not bool(torch.isfinite(rows.sum())):
                fine = torch.isfinite(rows).all(dim=-1)
                lost[name] += int((~fine).sum())
                rows = rows[fine]
            kept[name] += len(rows)
            if len(rows):
                if batch in measured:
                    sizes[name] = max(sizes.get(name, 0.0), largest(rows))
                see[name](rows)

        def look(block: nn.Module, batch: int, device: torch.device) -> list[tuple[str, Tensor]]:
            later: list[tuple[str, Tensor]] = []
            waiting = set(see)

            def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
                def show(module: nn.Module, args: tuple[Any, ...]) -> None:
                    if self.inputs.others:  # several threads look; one of them takes, in the order of the batches
                        later.append((name, args[0].clone()))
                    else:
                        take(batch, name, args[0])
                    waiting.discard(name)
                    if not waiting:
                        raise _Enough

                return show

            with watching({block.get_submodule(name): hook(name) for name in see}), suppress(_Enough):
                self.replay.run(batch, wanted=tuple(see), block=block, device=device)
            return later

        chosen = range(len(self.inputs.hidden)) if batches is None else batches
        for batch, found in self.inputs.spread(self.block, chosen, look):
            for name, x in found:
                take(batch, name, x.to(self.inputs.device))
        self.magnitudes.first_look(self.groups, sizes)
        self.dropped = max(self.dropped, *lost.values())
        for name, rows in kept.items():
            if not rows:
                raise error(
                    "not_finite",
                    what=f"Every calibration input of {self.prefix}.{name}",
                    hint="Calibrate on other text, and check that the source model computes sensible output.",
                )

    def grams(self, names: Iterable[str], keep: bool = False) -> dict[str, Tensor]:
        """The second moment of the inputs of each named linear, the mean of ``x x^T`` over tokens: [K, K] float32.

        An expert's comes in one pass with those of its neighbours (``experts.chunks``), which then are at hand.
        ``keep`` as in ``observe``.
        """
        wanted = list(names)
        missing = [name for name in wanted if name not in self._ahead]
        if missing:
            self._ahead |= self._grams([*missing, *self._neighbours(missing)], keep)
        return {name: self._ahead.pop(name) for name in wanted}

    def _neighbours(self, names: list[str]) -> list[str]:
        """The first linears of the groups that belong to other experts of the same part, in the same place."""
        places = {place(name) for name in names if place(name) is not None}
        part = next((part for part in self.parts() if any(names[0] in group for group in part.groups)), None)
        if not places or part is None or not experts_of(self.block):
            return []
        firsts = [group[0] for group in part.groups if group[0] not in self.finished]
        return [name for name in firsts if name not in names and place(name) in places]

    def _grams(self, names: list[str], keep: bool) -> dict[str, Tensor]:
        # Made here: what is made during inference cannot be changed in place after it.
        sums = {name: self.new_moment(name) for name in names}
        rows = dict.fromkeys(names, 0)
        keep = keep and not any(place(name) for name in names)

        def add(name: str) -> Callable[[Tensor], None]:
            def see(x: Tensor) -> None:
                add_second_moment(sums[name], x)
                rows[name] += len(x)

            return see

        self.observe({name: add(name) for name in names}, keep=keep)
        return {name: mirror(total.div_(rows[name])) for name, total in sums.items()}

    def new_moment(self, name: str) -> Tensor:
        """Zeros [K, K] float32 for the inputs of a linear."""
        weight = self.linears[name].weight
        return torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)

    def parts(self) -> list[Part]:
        """The work in parts that bound the memory for second moments: all but experts, then experts a few at a time."""
        experts = experts_of(self.block)
        chunks: list[tuple[str, ...]] = [()]
        for name, mixture in experts.items():
            chunks += [tuple(f"{name}.{number}." for number in chunk) for chunk in mixture.chunks()]
        mixed = tuple(f"{name}." for name in experts)
        parts = []
        for chunk in chunks:

            def inside(name: str, chunk: tuple[str, ...] = chunk) -> bool:
                return name.startswith(chunk) if chunk else not name.startswith(mixed)

            parts.append(
                Part(
                    [name for name in self.linears if inside(name)],
                    [group for group in self.groups if inside(group[0])],
                    [pair for pair in self.pairs if inside(pair.source)],
                )
            )
        return [part for part in parts if part.linears or part.pairs]

    def tried(self, pair: Pair) -> list[str]:
        """The quantized targets of a pair whose rounding a search looks at: of many experts, those with most tokens."""
        quantized = [name for name in pair.targets if name in self.linears]
        if place(pair.source) is not None:
            return quantized
        kept = set()
        for name, seen in zip(experts_of(self.block), self.experts, strict=True):
            busiest = sorted(range(len(seen.tokens)), key=lambda number: -seen.tokens[number])[:TRIED_EXPERTS]
            kept |= {f"{name}.{number}" for number in busiest}
        return [name for name in quantized if place(name) is None or expert(name) in kept]

    def some_batches(self, tokens: int) -> list[int]:
        """The first calibration batches that together hold at least ``tokens`` tokens."""
        chosen: list[int] = []
        for number, shape in enumerate(self.inputs.hidden.shapes):
            if tokens <= 0:
                break
            chosen.append(number)
            tokens -= shape[0] * shape[1]
        return chosen

    # --- changing the block ---------------------------------------------------------------------------------------

    def fold(self, pair: Pair, scales: Tensor) -> Tensor:
        """Move ``scales`` from the pair's source into its targets; the block's function stays.

        Returns what the targets' columns were multiplied by, [K]: their inputs are now divided by it. What is folded
        but not quantized is noted in ``changed``.
        """
        changed, columns = fold(self.block, pair, scales, self.plan.heads, self.plan.storage)
        self.changed |= changed
        for name in (pair.source, *pair.targets):
            module = self.block.get_submodule(name)
            # Routers among them are no linears, but matrices all the same.
            if name not in self.linears and f"{name}.weight" not in changed:
                assert isinstance(module.weight, Tensor)
                module.weight.data.copy_(module.weight.data.to(self.plan.storage))
                self.changed[f"{name}.weight"] = module.weight.data
                if name == pair.source and isinstance(module.bias, Tensor):
                    self.changed[f"{name}.bias"] = module.bias.data
        low, high = columns.aminmax()
        for name in pair.targets:
            self.remark(name, scaled=f"by {float(low):.3g} to {float(high):.3g}")
        return columns

    def remark(self, name: str, **said: float | str) -> None:
        """Say in the report how the numbers of the linear ``name`` were chosen."""
        self.remarks.setdefault(name, {}).update(said)

    def weight(self, name: str) -> Tensor:
        """The present float32 weight [N, K] of a linear."""
        return self.linears[name].weight.data

    def finish(
        self, name: str, codes: Tensor, scales: Tensor, zeros: Tensor, input_scale: Tensor | None = None
    ) -> None:
        """Hand over a linear: its codes and scales are what will be written, and what the block computes with now.

        codes [N, K] uint8, scales and zeros [N, K / G] float32; ``input_scale``, a float32 scalar, where activations
        have a stored scale. Each linear once.
        """
        assert name not in self.finished, name
        linear = self.linears[name]
        spec = self._specs[name]
        assert spec.static_input == (input_scale is not None), name
        group_size = linear.in_features if spec.group_size == -1 else spec.group_size
        weight = QWeight(
            scheme=spec.scheme,
            codes=codes,
            scales=scales,
            zeros=None if spec.symmetric else zeros.to(torch.uint8),
            bias=None if linear.bias is None else linear.bias.data,
            group_size=group_size,
            input_scale=input_scale,
        )
        self._reference[name] = linear.weight.data
        self.finished[name] = weight
        take_weight(linear, weight, linear.weight.device)
        self.magnitudes.weight_after[name] = largest(linear.weight.data)

    def start_over(self, parameters: Mapping[str, Tensor]) -> None:
        """Take back every fold and every finished linear: ``parameters`` are the block's, as they were."""
        for name, value in parameters.items():
            path, _, last = name.rpartition(".")
            old = self.block.get_parameter(name)
            new = nn.Parameter(value.to(device=old.device, dtype=torch.float32), requires_grad=False)
            setattr(self.block.get_submodule(path), last, new)
        for kept in (self.finished, self.changed, self._reference, self.remarks):
            kept.clear()

    def adopt(self, name: str, weight: QWeight) -> None:
        """Take over a linear that an earlier run finished; the block computes as after ``finish``."""
        self.finished[name] = weight
        take_weight(self.linears[name], weight, self.linears[name].weight.device)

    # --- leaving --------------------------------------------------------------------------------------------------

    def advance(self, last: bool = False) -> None:
        """Replace the calibration inputs by the block's outputs, and measure the error of each linear on the way.

        After the ``last`` block nobody looks at them: only what is measured is computed.
        """
        assert set(self.finished) == set(self.linears), "a method must finish every linear"
        for mixture in experts_of(self.block).values():
            mixture.everywhere = frozenset()
        comparison = Comparison(self.linears, self._reference, self.magnitudes.input_after)
        measured = self.some_batches(ERROR_TOKENS)
        with torch.inference_mode(), comparison:
            for batch in measured:
                self.inputs.hidden[batch] = self.replay.run(batch, whole=True).to("cpu")

        def run(block: nn.Module, batch: int, device: torch.device) -> Tensor:
            return self.replay.run(batch, block=block, device=device).to("cpu")

        rest = range(len(measured), len(measured) if last else len(self.inputs.hidden))
        for batch, output in self.inputs.spread(self.block, rest, run):
            self.inputs.hidden[batch] = output
        self.errors = comparison.errors()
        for name in self.linears:
            traced = any(name in group for group in self.groups) or name.startswith(self._rounded)
            if len(self.inputs.hidden) and not traced:
                self.warnings.append(f"{self.prefix}.{name} saw no calibration token; it was rounded plainly.")
        self._reference.clear()
