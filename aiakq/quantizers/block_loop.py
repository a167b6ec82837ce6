"""Quantizes the decoder blocks in order: load, calibrate, quantize, write, free."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.formats.steps import CommittedStep
from aiakq.quantizers.block.decoder_block import BlockPlan, DecoderBlock
from aiakq.quantizers.block.original import OriginalModel
from aiakq.quantizers.block.quantize import quantize_block
from aiakq.quantizers.importance.gradient_pass import GradientPass
from aiakq.quantizers.model.activations import Activations
from aiakq.quantizers.model.calibration_inputs import calibration_batches, first_inputs
from aiakq.quantizers.model.smooth_mappings import BlockTrace
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.progress import OnProgress, StageProgress
from aiakq.quantizers.recipe import Recipe
from aiakq.quantizers.workers.protocol import Value, Workers
from aiakq.quantizers.writing import take_over, write_block
from aiakq.runtime.device_memory import release_memory


@dataclass(frozen=True)
class Calibration:
    """Data that every worker needs to quantize the blocks.

    samples  token ids, each [T] int64; None if there are none.
    budget   bytes of hidden states in memory; the rest is spilled to files in ``scratch``.
    seed     seed of the tokens that are sampled for the importance of calibration tokens.
    """

    model: SourceModel
    recipe: Recipe
    plan: BlockPlan
    samples: Sequence[Tensor] | None
    budget: float
    scratch: Path
    seed: int = 0


@dataclass
class BlockLoop:
    """Quantizes the blocks, continuing after the ``finished`` ones that an earlier run has written.

    Every worker runs one; only worker 0 has a ``writer``.

    steps     committed steps, one per block.
    warnings  sentences for the report.
    """

    calibration: Calibration
    workers: Workers
    progress: OnProgress
    finished: int = 0
    writer: CheckpointWriter | None = None
    steps: list[CommittedStep] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Quantize the blocks in order, starting after those that are already on disk."""
        model, recipe, plan = self.calibration.model, self.calibration.recipe, self.calibration.plan
        count = len(model.blocks)
        self.steps = [] if self.writer is None else self.writer.steps[:count]
        if self.finished > count:  # only the evaluation is left
            return
        batches = calibration_batches(self.calibration.samples, model.features)
        gradients = recipe.weighs_tokens or recipe.weighs_rows
        weights = self._gradients(batches).run() if gradients and batches else []
        inputs = self._inputs(batches)
        unquantized = None
        if recipe.needs_original:
            unquantized = OriginalModel(model.blocks, inputs, self.workers, recipe)
        trace = BlockTrace(plan.heads, recipe.folds)
        for index, module in enumerate(model.blocks):
            prefix = model.block_prefix(index)
            self.progress(StageProgress("quantize", index, count, prefix))
            model.load(module, prefix)
            groups, mappings = trace.trace(module, index, inputs)
            original = None if unquantized is None else unquantized.block(module, index, inputs)
            block = DecoderBlock(module, index, prefix, plan, groups, inputs, original, mappings, self.workers)
            if weights:
                # Popped, because the weights of finished blocks are not needed.
                found = weights.pop(0)
                block.inputs.weights, block.inputs.rows = found if recipe.weighs_tokens else None, found.rows
                del found
            with torch.no_grad():
                self._finish(block, last=index == count - 1)
            model.drop(module)
            model.checkpoint.close()
            del block, original
            release_memory()  # or freed blocks would accumulate
        self.warnings += trace.warnings()
        self.progress(StageProgress("quantize", count, count))

    def _finish(self, block: DecoderBlock, last: bool) -> None:
        """Quantize and write a block, or restore it from its step; its outputs become the next block's inputs."""
        stored_name = self.calibration.model.stored_name
        if block.index < self.finished:
            names, *tensors = self.workers.broadcast(0, lambda: self._stored(block.index))
            assert isinstance(names, str)
            linears, stored = json.loads(names)
            take_over(block, linears, dict(zip(stored, tensors, strict=True)), stored_name)  # type: ignore[arg-type]
            if not last:
                block.inputs.activations.advance(block.module, block.index)
        else:
            quantize_block(self.calibration.recipe, block)
            if self.workers.size > 1:
                self.workers.agree(_digest(block))
            block.advance(last)
            if self.writer is not None:
                self.steps.append(write_block(self.writer, block, stored_name))
        if block.original is not None and not last:
            block.original.advance(block.index)

    def _stored(self, index: int) -> list[Value]:
        """Return what an earlier run stored for a block: the names of its linears and tensors, and the tensors."""
        assert self.writer is not None
        step = self.steps[index]
        written = self.writer.read(step)
        return [json.dumps([list(step.note["linears"]), list(written)]), *written.values()]

    def _gradients(self, batches: list[Tensor]) -> GradientPass:
        """Return the pass that determines the weights of the calibration tokens, block by block."""
        calibration = self.calibration

        def report(done: int, total: int) -> None:
            self.progress(StageProgress("importance", done, total))

        budget, scratch, seed = calibration.budget, calibration.scratch, calibration.seed
        rows = calibration.recipe.weighs_rows
        return GradientPass(calibration.model, batches, self.workers, budget, scratch, seed, report, rows)

    def _inputs(self, batches: list[Tensor]) -> Activations:
        """Return the calibration samples at the input of the first block."""
        calibration = self.calibration

        def report(done: int) -> None:
            self.progress(StageProgress("calibrate", done, len(batches)))

        return first_inputs(calibration.model, batches, self.workers, calibration.budget, calibration.scratch, report)


def _digest(block: DecoderBlock) -> int:
    """Return a checksum of a quantized block."""
    checksum = 0
    for weight in block.result.finished.values():
        for tensor in (weight.codes, weight.scales):
            checksum = zlib.crc32(tensor.cpu().contiguous().numpy().data, checksum)
    for changed in block.folder.changed.values():
        checksum = zlib.crc32(changed.cpu().contiguous().numpy().data, checksum)
    return checksum
