"""DecoderBlock: a decoder block during quantization, the interface of transforms and rounders.

A transform observes ``inputs`` and folds scales. A rounder submits every linear with ``finish``, which replaces the
weight in the block by its rounded version, so that later linears are calibrated on what they will see when served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aiakq.formats import has_signed_scales
from aiakq.quantizers.block.float_rounding import FloatRounding
from aiakq.quantizers.block.inputs import BlockInputs, count_expert_tokens
from aiakq.quantizers.block.original import OriginalBlock
from aiakq.quantizers.block.result import BlockResult
from aiakq.quantizers.block.scale_folder import ScaleFolder
from aiakq.quantizers.model.activations import SAMPLE_TOKENS, Activations
from aiakq.quantizers.model.experts import expert, expert_pattern, experts_of, in_stages
from aiakq.quantizers.model.groups import Heads, SmoothMapping, block_linears
from aiakq.quantizers.numerics.output_error import OutputErrors
from aiakq.quantizers.workers.protocol import Task, Value, Workers
from aiakq.quantizers.workers.worker_group import FirstWorker
from aiakq.rounding.integers import Rounding, round_weight
from aiakq.rounding.ranges import may_be_signed, round_near, round_searched
from aiakq.spec import LayerSpec, QuantSpec

#: Number of experts whose rounding error is evaluated in the search for a scale that all of them share.
TRIED_EXPERTS = 4


@dataclass(frozen=True)
class BlockPlan:
    """The settings shared by all blocks.

    storage  dtype of unquantized tensors in the output (norms, biases).
    scales   dtype in which scales are stored.
    """

    spec: QuantSpec
    storage: torch.dtype
    scales: torch.dtype
    heads: Heads


@dataclass(frozen=True)
class BlockPart:
    """Some linears of a block by name, their groups, and the mappings whose smooth layer is one of them or a norm."""

    linears: list[str]
    groups: list[tuple[str, ...]]
    mappings: list[SmoothMapping]


class DecoderBlock:
    """One block of the model.

    linears       linears to quantize, by name inside the block.
    groups        groups of linears that share an input, in execution order.
    mappings      smooth mappings with at least one quantized balance layer; empty if no transform folds scales.
    original      the block of the unquantized model; None unless the recipe needs it.
    inputs        calibration inputs of its linears.
    folder        folds scales.
    floats        rounds the linears that are stored as floats.
    result        finished linears, their errors and remarks.
    clip          clipping magnitude of each group of a linear, [N, K / G] by name; absent: no clipping.
    input_scales  static activation scale of a linear, a float32 scalar by name.
    experts       calibration token counts of the block's experts, if it has any.
    workers       the workers of the run, to which a method may assign tasks.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        prefix: str,
        plan: BlockPlan,
        groups: list[tuple[str, ...]],
        activations: Activations,
        original: OriginalBlock | None = None,
        mappings: tuple[SmoothMapping, ...] = (),
        workers: Workers | None = None,
    ) -> None:
        self.workers = workers or FirstWorker()
        self.module = module
        self.index = index
        self.prefix = prefix
        self.plan = plan
        self.original = original
        self.linears: dict[str, nn.Linear] = {}
        self._specs: dict[str, QuantSpec] = {}
        for name, linear in block_linears(module).items():
            spec = plan.spec.for_layer(f"{prefix}.{name}")
            if spec is not None:
                self.linears[name], self._specs[name] = linear, spec
        self.experts = count_expert_tokens(module, index, prefix, activations, self.workers)
        self._uncalibrated = tuple(
            f"{name}.{number}." for name, seen in zip(experts_of(module), self.experts, strict=True)
            for number in seen.rounded
        )  # fmt: skip
        self.groups = self._ordered(groups)
        if original is not None:
            theirs = experts_of(original.module)
            for name, mixture in experts_of(module).items():
                theirs[name].everywhere = mixture.everywhere
        self.mappings = tuple(
            mapping
            for mapping in mappings
            if any(name in self.linears for name in mapping.balance_layers)
            and not mapping.smooth_layer.startswith(self._uncalibrated)
        )
        self.result = BlockResult(self.linears, self._specs)
        stages = [[group[0] for group in part.groups] for part in self.parts()] if self.experts else []
        self.inputs = BlockInputs(module, index, prefix, activations, self.groups, stages, self.result, self.workers)
        self.floats = FloatRounding(self.linears, self._specs, groups)
        self.folder = ScaleFolder(module, self.linears, plan.heads, plan.storage)
        self.clip: dict[str, Tensor] = {}
        self.input_scales: dict[str, Tensor] = {}

    def _ordered(self, groups: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Return the calibrated and quantized linears of ``groups``; experts of one chunk stage by stage."""
        kept = [tuple(name for name in group if name in self.linears) for group in groups]
        kept = [group for group in kept if group and not group[0].startswith(self._uncalibrated)]
        for name, mixture in experts_of(self.module).items():
            kept = in_stages(kept, mixture, name)
        return kept

    def spec(self, name: str) -> QuantSpec:
        """Return the quantization spec of the linear ``name``."""
        return self._specs[name]

    def weight(self, name: str) -> Tensor:
        """Return the current float32 weight [N, K] of a linear."""
        return self.linears[name].weight.data

    # --- parts ----------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> BlockPart:
        """Return the whole block as one part."""
        return BlockPart(list(self.linears), self.groups, list(self.mappings))

    def parts(self) -> list[BlockPart]:
        """Split the block to bound the memory for statistics: all except experts, then a few experts at a time."""
        experts = experts_of(self.module)
        chunks: list[tuple[str, ...]] = [()]
        for name, mixture in experts.items():
            chunks += [tuple(f"{name}.{number}." for number in chunk) for chunk in mixture.chunks()]
        mixed = tuple(f"{name}." for name in experts)
        parts = []
        for chunk in chunks:

            def inside(name: str, chunk: tuple[str, ...] = chunk) -> bool:
                return name.startswith(chunk) if chunk else not name.startswith(mixed)

            parts.append(
                BlockPart(
                    [name for name in self.linears if inside(name)],
                    [group for group in self.groups if inside(group[0])],
                    [mapping for mapping in self.mappings if inside(mapping.smooth_layer)],
                )
            )
        return [part for part in parts if part.linears or part.mappings]

    def same_scheme(self, group: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Split the linears of a group by their quantization scheme."""
        parts: dict[LayerSpec, list[str]] = {}
        for name in group:
            parts.setdefault(self._specs[name].layer, []).append(name)
        return [tuple(names) for names in parts.values()]

    def searched_layers(self, mapping: SmoothMapping) -> list[str]:
        """Return the quantized balance layers evaluated in a search; of many experts those with the most tokens."""
        quantized = [name for name in mapping.balance_layers if name in self.linears]
        if expert_pattern(mapping.smooth_layer) is not None:
            return quantized
        kept = set()
        for name, seen in zip(experts_of(self.module), self.experts, strict=True):
            busiest = sorted(range(len(seen.tokens)), key=lambda number: -seen.tokens[number])[:TRIED_EXPERTS]
            kept |= {f"{name}.{number}" for number in busiest}
        return [name for name in quantized if expert_pattern(name) is None or expert(name) in kept]

    # --- modification -------------------------------------------------------------------------------------------------

    def fold(self, mapping: SmoothMapping, scales: Tensor) -> Tensor:
        """``ScaleFolder.fold``, with a remark for the report."""
        columns = self.folder.fold(mapping, scales)
        low, high = columns.aminmax()
        for name in mapping.balance_layers:
            self.result.remark(name, scaled=f"by {float(low):.3g} to {float(high):.3g}")
        return columns

    def rtn(self, name: str, clip: Tensor | None = None, weight: Tensor | None = None) -> Rounding:
        """Round the linear's weight to nearest, or ``weight`` [N, K] instead of it; ``clip`` [N, K / G] limits the
        ranges of its groups."""
        spec, weight = self._specs[name], self.weight(name) if weight is None else weight
        if spec.layer.is_float:
            return self.floats.round(name, weight, searched=False)
        return round_weight(weight, spec.bits, spec.group_size, spec.symmetric, self.plan.scales, clip)

    def rtn_searched(self, name: str, near: bool, signed: bool = False, weight: Tensor | None = None) -> Rounding:
        """The same, with ranges searched by the rounding error of the weights, ``near`` the full range or below it.

        ``signed`` as in ``round_searched``; it has no effect near the full range, or if the format has positive scales.
        """
        spec, weight = self._specs[name], self.weight(name) if weight is None else weight
        if spec.layer.is_float:
            return self.floats.round(name, weight, searched=True)
        scheme = spec.bits, spec.group_size, spec.symmetric, self.plan.scales
        if near:
            return round_near(weight, *scheme)
        return round_searched(weight, *scheme, signed=signed and self.signed_scales(name))

    def signed_scales(self, *names: str) -> bool:
        """Whether scales of these linears of equal scheme may be negative; if the readers of their format cannot have
        them, the report says so."""
        spec = self._specs[names[0]]
        if spec.layer.is_float or not may_be_signed(spec.bits, spec.symmetric):
            return False
        if has_signed_scales(spec.format):
            return True
        for name in names:
            self.result.remark(name, scales=f"positive, as readers of {spec.format} need them")
        return False

    def finish(self, name: str, rounding: Rounding) -> None:
        """Submit a rounded linear; see ``BlockResult.finish``."""
        self.result.finish(name, rounding, self.input_scales.get(name), self.floats.unit(name))

    def finish_blocks(self, name: str, rows: Tensor) -> None:
        """Submit a linear as rows of blocks; see ``BlockResult.finish_blocks``."""
        self.result.finish_blocks(name, rows)

    def finish_shared(self, tasks: Mapping[str, Callable[[], Rounding]]) -> None:
        """Submit the linears that ``tasks`` names, in order; each is rounded by one of the workers.

        A task may only depend on data that is the same on every worker, and not on other tasks.
        """
        work = []
        for name, task in tasks.items():

            def run(task: Callable[[], Rounding] = task) -> list[Value]:
                return list(task())

            work.append(Task(self.weight(name).numel(), run))
        for name, result in zip(tasks, self.workers.share(work), strict=True):
            codes, scales, zeros = result
            assert isinstance(codes, Tensor) and isinstance(scales, Tensor) and isinstance(zeros, Tensor)
            self.finish(name, (codes, scales, zeros))

    def restore(self, parameters: Mapping[str, Tensor]) -> None:
        """Undo all folds and finished linears. ``parameters`` are the original parameters of the block."""
        for name, value in parameters.items():
            path, _, last = name.rpartition(".")
            old = self.module.get_parameter(name)
            new = nn.Parameter(value.to(device=old.device, dtype=torch.float32), requires_grad=False)
            setattr(self.module.get_submodule(path), last, new)
        self.result.clear()
        self.folder.clear()
        self.floats.clear()
        self.clip.clear()
        self.input_scales.clear()

    def advance(self, last: bool = False) -> None:
        """Replace the calibration inputs by the block's outputs, and measure the error of each linear.

        After the ``last`` block the outputs are not needed: only the measured batches are computed.
        """
        assert set(self.result.finished) == set(self.linears), "a rounder must finish every linear"
        for mixture in experts_of(self.module).values():
            mixture.everywhere = frozenset()
        activations, replay = self.inputs.activations, self.inputs.replay
        errors = OutputErrors(self.linears, self.result.originals, self.result.magnitudes.input_after)
        measured = activations.first_batches(SAMPLE_TOKENS)
        with torch.inference_mode(), errors:
            for batch in measured:
                activations.hidden[batch] = replay.run(batch, run_all=True).to("cpu")

        def run(block: nn.Module, batch: int, device: torch.device) -> Tensor:
            return replay.run(batch, block=block, device=device).to("cpu")

        rest = [] if last else activations.here[len(measured) :]
        for batch, output in activations.spread(self.module, rest, run):
            activations.hidden[batch] = output
        self.result.errors = errors.errors()
        for name in self.linears:
            traced = any(name in group for group in self.groups) or name.startswith(self._uncalibrated)
            if len(activations.hidden) and not traced:
                self.result.warnings.append(
                    f"{self.prefix}.{name} saw no calibration token; it was quantized with round-to-nearest (RTN)."
                )
        self.result.originals.clear()
