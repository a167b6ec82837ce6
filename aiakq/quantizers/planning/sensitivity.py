"""Measures how the KL divergence of a model changes when a part of it is quantized to fewer bits.

One pass over the model, block by block. Along with the model's hidden states it propagates one copy per block, in which
only that block was rounded; at the end, the predictions of each copy are compared with the model's. That gives the cost
of an error of a given size in a block's output. Inside each block every part is rounded separately to every candidate
width, which gives the size of its error. The product of both is the part's cost.

A part is a set of linears stored alike: those that share an input, or the same projection of all experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from aiakq.quantizers.model.activations import Activations
from aiakq.quantizers.model.groups import Heads, block_linears
from aiakq.quantizers.model.outer_layers import capture, finish, load_outside
from aiakq.quantizers.model.smooth_mappings import BlockTrace
from aiakq.quantizers.model.source import SourceModel
from aiakq.rounding.integers import dequantize, round_weight
from aiakq.spec import LayerSpec

#: Number of tokens propagated through the model.
SAMPLE_TOKENS = 4096


@dataclass
class ModelPart:
    """Linears stored alike, by full name, their number of weights, and the cost of each candidate: KL in nats."""

    names: tuple[str, ...]
    weights: int
    k: int
    kl: list[float] = field(default_factory=list)


def measure(
    model: SourceModel,
    batches: Sequence[Tensor],
    candidates: Sequence[LayerSpec],
    reference: int,
    storage: torch.dtype,
    progress: Callable[[int, int], None],
) -> list[ModelPart]:
    """Return the cost of every part of the model for every candidate.

    batches: token ids, each [B, T] int64. ``candidates[reference]`` is the width to which whole blocks are rounded to
    measure how their errors affect the predictions. ``progress(done, total)`` counts blocks.
    """
    base = capture(model, batches, lambda _: None)
    trace = BlockTrace(Heads.of(model.config), False)
    others: list[Activations] = []
    sizes: list[float] = []
    errors: list[list[tuple[ModelPart, list[float]]]] = []
    total = len(model.blocks)
    for index, block in enumerate(model.blocks):
        progress(index, total)
        prefix = model.block_prefix(index)
        model.load(block, prefix)
        plain = base.copy()
        plain.advance(block, index)
        parts = _parts(block, trace.trace(block, index, base)[0])
        part_gaps: list[tuple[ModelPart, list[float]]] = []
        for names in parts:
            linears = [block.get_submodule(name) for name in names]
            weights = sum(linear.weight.numel() for linear in linears if isinstance(linear.weight, Tensor))
            part = ModelPart(tuple(f"{prefix}.{name}" for name in names), weights, linears[0].in_features)  # type: ignore
            gaps = []
            for candidate in candidates:
                with _RoundedLinears(block, names, candidate, storage):
                    gaps.append(_squared_distance(base, plain, block, index))
            part_gaps.append((part, gaps))
        rounded = base.copy()
        with _RoundedLinears(block, [name for names in parts for name in names], candidates[reference], storage):
            sizes.append(_squared_distance(base, plain, block, index))
            rounded.advance(block, index)
        for other in others:
            other.advance(block, index)
        others.append(rounded)
        errors.append(part_gaps)
        base = plain
        model.drop(block)
    progress(total, total)
    load_outside(model)
    costs = [_divergence(model, batches, base, other) for other in others]
    for part_gaps, size, cost in zip(errors, sizes, costs, strict=True):
        for part, gaps in part_gaps:
            part.kl = [gap / size * cost if size else 0.0 for gap in gaps]
    return [part for part_gaps in errors for part, _ in part_gaps]


def _parts(block: nn.Module, groups: Iterable[tuple[str, ...]]) -> list[list[str]]:
    """Split the linears of a block into parts; a linear in no group is its own part."""
    parts: dict[str, list[str]] = {}
    grouped = [*groups, *((name,) for name in block_linears(block))]
    seen: set[str] = set()
    for group in grouped:
        kind = re.sub(r"\bexperts\.\d+\b", "experts.*", group[0])
        parts.setdefault(kind, []).extend(name for name in group if name not in seen)
        seen.update(group)
    return [names for names in parts.values() if names]


class _RoundedLinears:
    """Replaces the weights of some linears of a block by those rounded to ``layer`` while open."""

    def __init__(self, block: nn.Module, names: Iterable[str], layer: LayerSpec, storage: torch.dtype) -> None:
        linears = block_linears(block)
        self.linears = [linears[name] for name in names]
        self.layer = layer
        self.storage = storage

    def __enter__(self) -> None:
        self.kept = [linear.weight for linear in self.linears]
        layer = self.layer
        for linear in self.linears:
            rounded = round_weight(linear.weight.data, layer.bits, layer.group_size, layer.symmetric, self.storage)
            linear.weight = nn.Parameter(dequantize(*rounded, layer.group_size), requires_grad=False)

    def __exit__(self, *_: object) -> None:
        for linear, weight in zip(self.linears, self.kept, strict=True):
            linear.weight = weight


def _squared_distance(inputs: Activations, expected: Activations, block: nn.Module, index: int) -> float:
    """Return the squared distance of the block's outputs from those in ``expected``."""
    total = 0.0
    with torch.inference_mode():
        for batch in range(len(inputs.hidden)):
            gap = inputs.run(block, index, batch).to("cpu") - expected.hidden[batch]
            total += float(gap.square().sum(dtype=torch.float64))
    return total


def _divergence(model: SourceModel, batches: Sequence[Tensor], base: Activations, other: Activations) -> float:
    """Return KL(model || model with other final hidden states), in nats per token."""
    total, count = 0.0, 0
    for batch, ids in enumerate(batches):
        for row in range(len(ids)):
            one = ids[row : row + 1]
            ours = finish(model, one, base.hidden[batch][row : row + 1], base.outputs).log_softmax(-1)
            theirs = finish(model, one, other.hidden[batch][row : row + 1], base.outputs).log_softmax(-1)
            total += float((ours.exp() * (ours - theirs)).sum(dtype=torch.float64))
            count += one.numel()
    return total / count
