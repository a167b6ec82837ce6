"""The interface between models and executors: the input and output of a step, and what a model provides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.ops.sampling import Sampler
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.lora.layers import AdaptableLayers


@dataclass
class StageOutput:
    """Output of a pipeline stage: ``x`` [T, hidden], and ``residual`` [T, hidden] or None, not yet added to it."""

    x: Tensor
    residual: Tensor | None


def whole_logits(output: Tensor | StageOutput) -> Tensor:
    """Return the logits [R, V] of a model that is not split into stages."""
    assert isinstance(output, Tensor), "the head is in another stage"
    return output


@dataclass
class InputRows:
    """Embeddings ``values`` [N, hidden] in place of those of the tokens ``rows`` [N] int64, in the activation dtype.

    added  what is added to the outputs of the first layers at these rows, [N, hidden] each (DeepStack; Meng et al.
           2024, arXiv:2406.04334).
    """

    rows: Tensor
    values: Tensor
    added: Sequence[Tensor] = ()

    def embed(self, x: Tensor) -> Tensor:
        """Return the embeddings x [T, hidden] of a step's tokens with these in their places."""
        return x.index_copy(0, self.rows, self.values)

    def add(self, layer: int, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output of ``layer``, x [T, hidden] and a residual or None, with what is added to it.

        Other rows keep their bits: the residual becomes a part of ``x`` at these rows only.
        """
        if layer >= len(self.added):
            return x, residual
        rows = self.rows
        at_rows = x[rows] if residual is None else x[rows] + residual[rows]
        x = x.index_copy(0, rows, at_rows + self.added[layer])
        return x, None if residual is None else residual.index_fill(0, rows, 0)


@dataclass
class ModelInput:
    """The flattened tokens of one step.

    token_ids   token ids [T] int64.
    positions   positions [T] int64.
    context     locations of keys and values in the KV cache.
    logit_rows  rows of T whose logits are needed, [R] int64.
    hidden      output of the previous stage, or of the target model of an EAGLE-3 head, which is modified; None
                elsewhere.
    aux_hidden_states  filled in by the model: [T, hidden] before each of its ``aux_layers``.
    input_rows  embeddings that replace those of some tokens, as the input of the first block.
    grid_positions  three positions [N, 3] int64 of each token whose position is row n of ``GridRotary``; None without
                any.
    """

    token_ids: Tensor
    positions: Tensor
    context: AttentionContext
    logit_rows: Tensor
    hidden: StageOutput | None = None
    aux_hidden_states: list[Tensor] = field(default_factory=list)
    input_rows: Sequence[InputRows] = ()
    grid_positions: Tensor | None = None


class Model(Protocol):
    """Interface of a model as the executor uses it, native or through transformers.

    sampler       sampler of the model's device.
    row_multiple  the numbers of token rows and logit rows must be multiples of this.
    adapters      layers that support LoRA adapters; None if LoRA is disabled.
    short_start   what is added to the positions of a short text (``RequestSpec.is_short``), whose rotary factors are
                  others; 0 if they are the same.
    """

    sampler: Sampler
    row_multiple: int
    adapters: AdaptableLayers | None
    short_start: int

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token in the KV caches of all layers, for caches of ``dtype``."""

    def state_bytes(self) -> int:
        """Return the bytes of one sequence's states in all recurrent layers; 0 if there are none."""

    def mixture_elements(self) -> int:
        """Return the most activations of one token, beside its own row, that a mixture of experts has at once, and the
        inputs of all layers; 0 without either.
        """

    def new_caches(self, pages: int, page_size: int, state_rows: int = 1) -> list[LayerCache]:
        """Allocate the KV cache of every layer, filled with zeros; for a recurrent layer, ``state_rows`` states.

        Their dtype is the KV cache dtype that the model was loaded with.
        """

    def forward(self, step: ModelInput, caches: list[LayerCache]) -> Tensor | StageOutput:
        """Run a step: write its keys and values into ``caches``, and return logits or hidden states.

        Returns logits [R, V] float32 of ``step.logit_rows``, or the input of the next stage.
        """
