"""Runs a checkpoint with one decoder block in memory at a time, through its transformers class in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.model.outer_layers import capture, finish, load_outside
from aiakq.quantizers.model.source import SourceModel


class BlockwiseCheckpoint:
    """The ``BlockwiseModel`` of a model folder, quantized or not. ``hidden`` determines where hidden states are kept;
    the LoRA adapter in the folder ``lora`` is merged into the weights.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        trust_remote_code: bool,
        hidden: HiddenStates,
        lora: str | Path | None = None,
    ) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.model = SourceModel(self.checkpoint, None, device, trust_remote_code)
        self.model.merge(lora)
        self.hidden = hidden
        self._outputs = 0

    def run_blocks(self, batches: Sequence[Tensor], on_block: Callable[[int, int], None]) -> HiddenStates:
        """See ``BlockwiseModel``. Afterwards everything except the blocks is in memory."""
        inputs = capture(self.model, batches, lambda _: None, self.hidden)
        total = len(self.model.blocks)
        for index, block in enumerate(self.model.blocks):
            on_block(index, total)
            self.model.load(block, self.model.block_prefix(index))
            inputs.advance(block, index)
            self.model.drop(block)
            self.checkpoint.close()
        on_block(total, total)
        self._outputs = inputs.outputs
        load_outside(self.model)
        return self.hidden

    def head(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """See ``BlockwiseModel``: ids [B, T], hidden [B, T, hidden size] -> logits [B, T, V] float32."""
        return finish(self.model, ids, hidden, self._outputs)
