"""Peak memory of a quantization on a CPU, counted from shapes: what the code holds at the same time, stage by stage.

Nothing is measured here. Each stage adds up the tensors that are alive at its largest moment, as the modules that it
names allocate them; a change there belongs here, too. Temporaries of a forward pass are those of a gated MLP, or of
attention if its projections are wider. Not counted are the memory of the process itself, which the caller adds, and
what the allocator does not return.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from aiakq.quantizers.block.original import batch_step
from aiakq.quantizers.model.experts import experts_of
from aiakq.quantizers.model.groups import FUSED, block_linears
from aiakq.quantizers.model.module_calls import FEWEST_TOKENS, TOKENS_TIMES_WIDTH
from aiakq.quantizers.recipe import Recipe
from aiakq.quantizers.workers.protocol import SHARDS
from aiakq.spec import QuantSpec

#: Everything is computed in float32.
_FLOAT = 4
#: Cached inputs of finished linears in memory (model/replay.py), rows of a task (rounders/gptq.py).
_CACHED_INPUTS, _FEWEST_ROWS = 2**29, 256
#: Transforms and rounders whose allocations are known.
_KNOWN = {"awq", "smooth_quant", "input_scales", "rtn", "gptq", "gptq_blocks", "nearest_blocks"}
_LOOPS = ("gptq", "gptq_blocks")


@dataclass(frozen=True)
class MemoryStage:
    """The largest moment of a stage: its name, what it is, and bytes."""

    name: str
    moment: str
    nbytes: int


@dataclass(frozen=True)
class QuantizationWork:
    """What is quantized, from headers.

    blocks   the decoder blocks, whose parameters are on the meta device.
    prefixes their names.
    outside  bytes in float32 of the layers before the blocks, and of the largest of them.
    rest     bytes of all tensors that are copied, in the dtype of the output.
    batches  shapes [B, T] of the calibration batches.
    hidden   size of the residual stream.
    budget   bytes of hidden states in memory.
    """

    blocks: Sequence[nn.Module]
    prefixes: Sequence[str]
    outside: tuple[int, int]
    rest: int
    batches: Sequence[tuple[int, ...]]
    hidden: int
    budget: float
    storage: torch.dtype
    spec: QuantSpec
    recipe: Recipe

    def unknown(self) -> str | None:
        """Return a component whose allocations are not known, or None."""
        return next((part.name for part in self.recipe.parts if part.name not in _KNOWN), None)

    def stages(self) -> list[MemoryStage]:
        """Return the largest moments of the stages before the evaluation, in their order."""
        largest = max((_Block(self, number) for number in range(len(self.blocks))), key=lambda block: block.peak[0])
        block, moment = largest.peak
        copying = MemoryStage("copy", "all tensors outside of the quantized layers", self.rest)
        stages = [self._first_inputs(), MemoryStage("quantize", f"{moment} in {largest.prefix}", block), copying]
        return stages if self.batches else stages[1:]

    @cached_property
    def tokens(self) -> int:
        return sum(math.prod(shape) for shape in self.batches)

    @cached_property
    def batch_tokens(self) -> int:
        return max((math.prod(shape) for shape in self.batches), default=0)

    @cached_property
    def original_tokens(self) -> int:
        """Tokens whose hidden states in the original model are computed as well."""
        if not self.recipe.needs_original:
            return 0
        every = batch_step(self.blocks, self.tokens, self.recipe.rounder.original_tokens)
        return sum(math.prod(shape) for shape in self.batches[::every])

    @property
    def hidden_states(self) -> int:
        """Bytes of hidden states in memory, of both models."""
        return min(_FLOAT * self.hidden * (self.tokens + self.original_tokens), int(self.budget))

    def spilled(self) -> int:
        """Return the bytes of hidden states on disk."""
        return max(_FLOAT * self.hidden * (self.tokens + self.original_tokens) - int(self.budget), 0)

    def _first_inputs(self) -> MemoryStage:
        """``outer_layers.capture``: the embedding while it is read, or with the first block and all hidden states."""
        whole, largest = self.outside
        first = _Block(self, 0)
        reading = whole + largest // _FLOAT * self.storage.itemsize
        running = whole + first.weights + first.forward + _FLOAT * self.hidden * self.tokens
        if running > reading:
            return MemoryStage("calibrate", "embedding, first block and hidden states", running)
        return MemoryStage("calibrate", "reading the embedding", reading)


class _Block:
    """The memory of one block while it is quantized."""

    def __init__(self, work: QuantizationWork, number: int) -> None:
        self.work, self.prefix, self.module = work, work.prefixes[number], work.blocks[number]
        self.linears: dict[str, Tensor] = {}
        self.codes = 0.0
        for name, linear in block_linears(self.module).items():
            spec = work.spec.for_layer(f"{self.prefix}.{name}")
            if spec is not None:
                self.linears[name] = linear.weight
                groups = 1 if spec.group_size == -1 else -(-linear.in_features // spec.group_size)
                # Codes of one byte; a scale and, where they are stored, a zero point of each group.
                self.codes += linear.weight.numel() + linear.out_features * groups * (4 if spec.symmetric else 5)
        self.weights = _FLOAT * sum(parameter.numel() for parameter in self.module.parameters())
        self.rounded = _FLOAT * sum(weight.numel() for weight in self.linears.values())

    @cached_property
    def groups(self) -> list[list[str]]:
        """Linears with a common input, judging by their names, in the order of the module."""
        found: dict[str, list[str]] = {}
        for name in self.linears:
            parent, _, last = name.rpartition(".")
            fused = next((names for names in FUSED if last in names), (last,))
            found.setdefault(f"{parent}.{fused[0]}", []).append(name)
        return list(found.values())

    @cached_property
    def forward(self) -> int:
        """Temporaries of the block on a calibration batch."""
        work = self.work
        wide = max((weight.shape[0] for weight in self.linears.values()), default=work.hidden)
        return _FLOAT * work.batch_tokens * (3 * wide + 3 * work.hidden)

    @property
    def peak(self) -> tuple[int, str]:
        """The largest moment, in bytes, and what it is."""
        moments = [self._writing(), self._measuring()]
        moments += self._rounding() if self.work.recipe.rounder.name in _LOOPS else []
        if self.work.recipe.transform("awq") is not None:
            moments.append(self._comparing())
        return max(moments)

    @cached_property
    def kept(self) -> int:
        """What is alive during all of the block: weights, hidden states, copies for a restart and of the original."""
        recipe, kept = self.work.recipe, self.weights + self.work.hidden_states
        if recipe.rounder.restartable and recipe.transform("awq") is not None:
            kept += self.weights // _FLOAT * self.work.storage.itemsize
        if recipe.needs_original and recipe.folds:
            kept += self.weights
        return kept

    def _measuring(self) -> tuple[int, str]:
        """``DecoderBlock.advance``: original and rounded weights, codes, and outputs of both."""
        outputs = max((weight.shape[0] for weight in self.linears.values()), default=0)
        compared = 4 * _FLOAT * self.work.batch_tokens * outputs
        nbytes = self.kept + self.rounded + self.codes + self._cached + self.forward + compared
        return int(nbytes), "measuring the error"

    def _writing(self) -> tuple[int, str]:
        """``write_block``: packed tensors, and a layer decoded twice."""
        largest = max((weight.numel() for weight in self.linears.values()), default=0)
        nbytes = self.kept + 2 * self.codes + self._cached + (2 * _FLOAT + 2 * _FLOAT) * largest
        return int(nbytes), "reading back the written layers"

    def _comparing(self) -> tuple[int, str]:
        """``Awq.guard``: all linears rounded to nearest beside the originals."""
        work = self.work
        sample = min(work.batch_tokens, max(FEWEST_TOKENS, TOKENS_TIMES_WIDTH // work.hidden))
        forward = self.forward * sample // max(work.batch_tokens, 1)
        return int(self.kept + self.rounded + forward), "comparing with round-to-nearest"

    # --- gptq ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _cached(self) -> int:
        """Cached inputs of modules that end with a linear (model/replay.py), in both models."""
        if self.work.recipe.rounder.name not in _LOOPS:
            return 0
        ends = [names[0] for names in self.groups if len(names) == 1 and ".experts." not in names[0]]
        return self._inputs_of(ends)

    def _inputs_of(self, names: Sequence[str]) -> int:
        width = _FLOAT * sum(self.linears[name].shape[1] for name in names)
        room = max(int(self.work.budget) - self.work.hidden_states, 0)
        return sum(
            min(tokens * width, _CACHED_INPUTS, room) for tokens in (self.work.tokens, self.work.original_tokens)
        )

    def _rounding(self) -> list[tuple[int, str]]:
        """``Gptq.round``: the moments of each group, and the solver, beside what earlier groups left."""
        moments, finished, ends = [], 0.0, list[str]()
        for group in self.groups:
            n, k = sum(len(self.linears[name]) for name in group), self.linears[group[0]].shape[1]
            mixed = ".experts." in group[0]
            together = self._together(group[0]) if mixed else 1
            if len(group) == 1 and not mixed:
                ends.append(group[0])
            cached = 0 if mixed else self._inputs_of(ends if len(group) == 1 else [*ends, group[0]])
            before = self.kept + finished * (_FLOAT + 1) + cached
            square, shift = _FLOAT * k * k, self._shift(n, k)
            # The sums of all batches, and those of a shard that are added to them.
            shards = 2 if len(self.work.batches) > 1 else 1
            forward = self.forward * (2 if shift else 1)
            moments.append((int(before + together * shards * (square + shift) + forward), f"moments of {group[0]}"))
            # numerics/gptq.py: Hessian, R and its inverse, a drift twice; a task's columns, their order, target, codes.
            matrices = (5 if shift and shift == square else 3) * square + (shift if shift != square else 0)
            rows = n if mixed else max(_FEWEST_ROWS, -(-n // SHARDS))
            columns = (3 * _FLOAT + 1 + (_FLOAT if shift else 0)) * k * min(rows, n)
            outputs = 2 * n * k  # codes of all tasks, and joined
            rounding = before + (together - 1) * (square + shift) + matrices + columns + outputs
            moments.append((int(rounding), f"rounding {group[0]}"))
            finished += sum(self.linears[name].numel() for name in group)
        return moments

    def _shift(self, n: int, k: int) -> int:
        """Bytes of the drift [K, K] or the shift [N, K] of a group, whichever is smaller."""
        return _FLOAT * k * min(n, k) if self.work.original_tokens else 0

    def _together(self, name: str) -> int:
        """Experts whose moments are accumulated in one pass."""
        mixture = next(found for path, found in experts_of(self.module).items() if name.startswith(f"{path}."))
        mixture.matrices = 2 if self.work.recipe.needs_original else 1
        return max(map(len, mixture.chunks()))


def block_groups(work: QuantizationWork) -> list[tuple[int, int]]:
    """Return N and K of all quantized linears that share an input, N summed."""
    groups = []
    for number in range(len(work.blocks)):
        block = _Block(work, number)
        for names in block.groups:
            shapes = [block.linears[name].shape for name in names]
            groups.append((sum(n for n, _ in shapes), shapes[0][1]))
    return groups


def evaluation_stage(
    copies: tuple[int, int] | None, outside: int, block: int, vocabulary: int, hidden: int, windows: tuple[int, int]
) -> MemoryStage:
    """Return the largest moment of the comparison with the source (evaluation/metrics.py).

    copies      bytes of both models in float32 and packed, if they are loaded whole; None: block by block.
    outside     bytes in float32 of the layers outside of the blocks; ``block``: of the largest block.
    windows     number and length of the windows.
    """
    from aiakq.evaluation.metrics import batch_bytes

    count, length = windows
    logits, rows = batch_bytes(count, length, vocabulary)
    # Logits of a batch and of both models' predictions, those of the next batch, and terms of some rows.
    compared = 4 * logits + 6 * rows
    if copies is not None:
        return MemoryStage("evaluate", "both models and their logits", sum(copies) + compared)
    states = 2 * _FLOAT * count * length * hidden
    return MemoryStage(
        "evaluate", "the layers outside of the blocks and logits", 2 * outside + max(block, compared) + states
    )
