"""Quantizes the decoder blocks one after the other: load, calibrate, quantize, write, free."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch

from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.formats.steps import CommittedStep
from aiakq.quantizers.block.decoder_block import BlockPlan, DecoderBlock, OriginalBlock
from aiakq.quantizers.block.quantize import quantize_block
from aiakq.quantizers.model.activations import Activations, HiddenStates, batched
from aiakq.quantizers.model.outer_layers import capture
from aiakq.quantizers.model.smooth_mappings import BlockTrace
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.progress import OnProgress, StageProgress
from aiakq.quantizers.writing import take_over, write_block
from aiakq.runtime.device_memory import release_memory

#: Tokens in one calibration batch.
_BATCH_TOKENS = 4096


@dataclass
class BlockLoop:
    """Quantizes the blocks into ``writer``, continuing after the steps that an earlier run has written.

    steps     what was written, block by block.
    warnings  sentences for the report.
    """

    prepared: Prepared
    plan: BlockPlan
    writer: CheckpointWriter
    progress: OnProgress
    steps: list[CommittedStep] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def run(self) -> None:
        model, recipe = self.prepared.model, self.prepared.recipe
        count = len(model.blocks)
        finished = len(self.writer.steps)
        self.steps = self.writer.steps[:count]
        if finished > count:  # only the evaluation was left
            return
        inputs = self._capture()
        original_inputs = inputs.copy() if recipe.needs_original else None
        trace = BlockTrace(self.plan.heads, recipe.folds)
        for index, module in enumerate(model.blocks):
            prefix = model.block_prefix(index)
            self.progress(StageProgress("quantize", index, count, prefix))
            model.load(module, prefix)
            groups, mappings = trace.trace(module, index, inputs)
            original = None
            if original_inputs is not None:
                original = OriginalBlock(copy.deepcopy(module), original_inputs)
            block = DecoderBlock(module, index, prefix, self.plan, groups, inputs, original, mappings)
            with torch.no_grad():
                self._finish(block, index < finished, last=index == count - 1)
            model.drop(module)
            self.prepared.checkpoint.close()
            del block, original
            release_memory()  # blocks must not pile up
        self.warnings += trace.warnings()
        self.progress(StageProgress("quantize", count, count))

    def _finish(self, block: DecoderBlock, resumed: bool, last: bool) -> None:
        """Quantize and write a block, or restore it from its step; its outputs become the next block's inputs."""
        if resumed:
            step = self.steps[block.index]
            take_over(block, step, self.writer.read(step), self.prepared.model.stored_name)
            if not last:
                block.inputs.activations.advance(block.module, block.index)
        else:
            quantize_block(self.prepared.recipe, block)
            block.advance(last)
            self.steps.append(write_block(self.writer, block, self.prepared.model.stored_name))
        if block.original is not None and not last:
            block.original.inputs.advance(block.original.module, block.index)

    def _capture(self) -> Activations:
        """The calibration samples as they reach the first block."""
        samples = self.prepared.samples
        states = HiddenStates((), self.prepared.activation_budget, self.writer.scratch)
        if samples is None:
            return Activations(states, {}, self.prepared.device)
        longest = max(len(sample) for sample in samples.samples)
        batches = batched(samples.samples, max(1, _BATCH_TOKENS // longest))
        total = len(batches)
        return capture(
            self.prepared.model, batches, lambda done: self.progress(StageProgress("calibrate", done, total)), states
        )
