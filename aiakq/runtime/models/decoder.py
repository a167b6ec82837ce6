"""The blocks every native family is made of, and the decoder that runs them over one step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.types import AttentionContext, Rows, Wish
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import Activation
from aiakq.runtime.layers.attention import Attention, LayerCache
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.layers.linear import ROW_MULTIPLE, AnyLinear, Embedding, selected, wish_of
from aiakq.runtime.layers.norm import AnyNorm
from aiakq.runtime.layers.rotary import Angles, Rotary


@dataclass
class ModelInput:
    """One step's tokens, flattened.

    token_ids   [T] int64.
    positions   [T] int64.
    context     where their keys and values live.
    logit_rows  [R] int64, the rows of T whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    context: AttentionContext
    logit_rows: Tensor


class Weights(Protocol):
    """Where a family's ``build`` pulls its tensors from; see aiakq/runtime/loader/weights.py."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor in the activation dtype; its shape is checked."""

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> AnyLinear:
        """The linear layer ``name`` with N outputs and K inputs, dense or quantized as the checkpoint holds it."""

    def stacked(self, parts: Sequence[tuple[str, int]], k: int, *, bias: bool = False) -> AnyLinear:
        """Several linear layers (name, N) with the same K inputs as one, outputs in the order given."""

    def dense(self, weight: Tensor, bias: Tensor | None = None) -> AnyLinear:
        """A linear layer of a weight [N, K] that is at hand."""

    def embedding(self, name: str, vocab: int, width: int, *, tied: bool) -> tuple[Embedding, AnyLinear | None]:
        """The table ``name`` [V, D]; if the head is tied to it, that too."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


class Model(Protocol):
    """What the runner needs of a model, native or through transformers.

    kv_shape      (layers, key-value heads, head size) of the cache.
    vocab_size    width of the logits.
    row_multiple  rows of tokens and logits come in multiples of this.
    """

    kv_shape: tuple[int, int, int]
    vocab_size: int
    row_multiple: int

    def forward(self, step: ModelInput, caches: list[LayerCache]) -> Tensor:
        """Logits [R, V] float32 of ``step.logit_rows``; writes the step's keys and values into ``caches``."""


@dataclass
class GatedMLP:
    """down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202); ``gate_up`` is both, gate's outputs first."""

    gate_up: AnyLinear
    down: AnyLinear
    act: Activation

    def wish(self, m: int) -> Wish:
        """See ``wish_of``."""
        return wish_of(self.gate_up, m)

    def __call__(self, x: Rows) -> Tensor:
        both = self.gate_up(x)
        return self.down(self.act.halves(both, wish_of(self.down, len(both))))


@dataclass
class PlainMLP:
    """second(act(first(x)))."""

    first: AnyLinear
    second: AnyLinear
    act: Activation

    def wish(self, m: int) -> Wish:
        """See ``wish_of``."""
        return wish_of(self.first, m)

    def __call__(self, x: Rows) -> Tensor:
        first = self.first(x)
        return self.second(self.act(first, wish_of(self.second, len(first))))


@dataclass
class Block:
    """One transformer layer: attention and MLP, each with a residual, normalized before (or after: OPT-350m)."""

    attention_norm: AnyNorm
    attention: Attention
    mlp_norm: AnyNorm
    mlp: GatedMLP | PlainMLP | SparseMLP
    norm_first: bool = True

    def __call__(
        self, x: Tensor, added: Tensor | None, angles: Angles | None, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden], which is modified, and what is still to be added to it -> the same of the next layer."""
        if self.norm_first:
            normed = self.attention_norm(x, added, self.attention.wish(len(x)))
            attended = self.attention(normed, angles, cache, context)
            wish = None if isinstance(self.mlp, SparseMLP) else self.mlp.wish(len(x))
            return x, self.mlp(self.mlp_norm(x, attended, wish))
        assert added is None
        x = self.attention_norm(self.attention(x, angles, cache, context), x)
        return self.mlp_norm(self.mlp(x), x), None


@dataclass
class Decoder:
    """A decoder-only language model: embedding, blocks, final norm, head.

    embedding        its first layer.
    positions        learned positions, a row for each, or None with rotary.
    project_in, out  between the embedding's width and the blocks' (OPT-350m), or None.
    """

    config: ModelConfig
    embedding: Embedding
    blocks: list[Block]
    norm: AnyNorm | None
    head: AnyLinear
    rotary: Rotary | None = None
    positions: Embedding | None = None
    project_in: AnyLinear | None = None
    project_out: AnyLinear | None = None
    row_multiple: int = ROW_MULTIPLE

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(self, step: ModelInput, caches: list[LayerCache]) -> Tensor:
        """See Model.forward."""
        return self.compute(step, caches).float()

    def compute(self, step: ModelInput, caches: list[LayerCache]) -> Tensor:
        """The logits in the activation dtype: what a recording can hold (program.py)."""
        x, added = self.embedding(step.token_ids), None
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            added = self.positions(step.positions)
        angles = self.rotary.at(step.positions) if self.rotary is not None else None
        for block, cache in zip(self.blocks, caches, strict=True):
            if not block.norm_first and added is not None:
                x, added = x + added, None
            x, added = block(x, added, angles, cache, step.context)
        x = selected(x, step.logit_rows)
        added = None if added is None else selected(added, step.logit_rows)
        if self.norm is not None:
            x = self.norm(x, added)
        elif added is not None:
            x = x + added
        if self.project_out is not None:
            x = self.project_out(x)
        return self.head(x)
