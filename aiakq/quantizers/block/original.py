"""The unquantized model beside the quantized one, block by block: its weights, and its hidden states on some tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from aiakq.quantizers.model.activations import Activations
from aiakq.quantizers.model.experts import experts_of
from aiakq.quantizers.model.groups import block_linears
from aiakq.quantizers.model.residuals import Residual, ResidualTrace
from aiakq.quantizers.recipe import Recipe
from aiakq.quantizers.workers.protocol import Workers, shards


@dataclass
class OriginalBlock:
    """The block in the unquantized model.

    module     the block with its original weights.
    inputs     its inputs in that model on some of the calibration batches; the others are absent.
    residuals  the linears whose outputs are added to the residual stream.
    advanced   the batches whose inputs have been replaced by the block's outputs.
    tokens_per_input  calibration tokens in that model per input of the widest linear; those of all workers.
    """

    module: nn.Module
    inputs: Activations
    residuals: Mapping[str, Residual] = field(default_factory=dict)
    advanced: set[int] = field(default_factory=set)
    tokens_per_input: float = 0.0

    def advance(self, index: int) -> None:
        """Replace the inputs by the outputs of the block, which has the index ``index``."""
        self.inputs.advance(self.module, index, self.advanced)


class OriginalModel:
    """The hidden states of the unquantized model at the next block.

    blocks  all blocks of the model, whose weights need not be loaded.
    inputs  the hidden states of the quantized model at the first block, which give up a part of their memory.
    recipe  says how many tokens it needs, and whether transforms modify the weights of a block before they are rounded.
    """

    def __init__(self, blocks: Iterable[nn.Module], inputs: Activations, workers: Workers, recipe: Recipe) -> None:
        self._folds = recipe.folds
        self._residuals = ResidualTrace()
        blocks = list(blocks)
        every = batch_step(blocks, inputs.tokens, recipe.rounder.original_tokens)
        self._tokens_per_input = inputs.tokens / every / widest(blocks)
        hidden = inputs.hidden
        mine = [batch for shard in shards(len(hidden))[workers.rank :: workers.size] for batch in shard]
        self.inputs = inputs.copy()
        self.inputs.hidden.keep_only({batch for batch in mine if batch % every == 0})
        self.inputs.hidden.budget = hidden.budget / (every + 1)
        hidden.budget -= self.inputs.hidden.budget

    def block(self, module: nn.Module, index: int, inputs: Activations) -> OriginalBlock:
        """Return the original of ``module``, whose weights are loaded; ``inputs`` are those of the quantized model.

        Parameters are shared, as quantization replaces them in ``module``, unless a transform modifies them.
        """
        for mixture in experts_of(module).values():
            mixture.matrices = 2
        residuals = self._residuals.trace(module, index, inputs)
        shared = {} if self._folds else {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        original = copy.deepcopy(module, shared)
        return OriginalBlock(original, self.inputs, residuals, tokens_per_input=self._tokens_per_input)


def batch_step(blocks: Iterable[nn.Module], tokens: int, per_input: int) -> int:
    """Return n if the hidden states of every n-th calibration batch suffice, of ``tokens`` tokens in all: those with at
    least ``per_input`` tokens per input of the widest linear; 0: all.

    Experts see only a part of the tokens, so that all are needed.
    """
    blocks = list(blocks)
    if not per_input or any(experts_of(block) for block in blocks):
        return 1
    return max(1, tokens // (widest(blocks) * per_input))


def widest(blocks: Iterable[nn.Module]) -> int:
    """Return the inputs of the widest linear of the blocks."""
    return max((linear.in_features for block in blocks for linear in block_linears(block).values()), default=1)
