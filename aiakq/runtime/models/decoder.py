"""The blocks every native family is made of, and the decoder that runs them over one step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import ActivationLayout, AttentionContext, LinearInput
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import Attention, LayerCache


@dataclass
class ModelInput:
    """One step's tokens, flattened.

    token_ids   [T] int64.
    positions   [T] int64.
    context     where their keys and values are in the cache.
    logit_rows  [R] int64, the rows of T whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    context: AttentionContext
    logit_rows: Tensor


class Weights(Protocol):
    """Where a family's ``build`` gets its tensors and layers from; see aiakq/runtime/loader/weights.py."""

    @property
    def ops(self) -> Ops:
        """The operations of the device, which bind the layers without large weights."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor in the activation dtype, on the device; its shape is checked."""

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> LinearLayer:
        """The linear layer ``name`` with N outputs and K inputs, dense or quantized as the checkpoint holds it."""

    def stacked(self, parts: Sequence[tuple[str, int]], k: int, *, bias: bool = False) -> LinearLayer:
        """Several linear layers (name, N) with the same K inputs as one, outputs in the order given."""

    def dense(self, weight: Tensor, bias: Tensor | None = None) -> LinearLayer:
        """A linear layer of a weight [N, K] that ``tensor`` returned."""

    def embedding(self, name: str, vocab: int, width: int, *, tied: bool) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """The embedding of the table ``name`` [V, D], and the head if it is tied to it."""


class Model(Protocol):
    """What the executor needs of a model, native or through transformers.

    kv_shape      (layers, key-value heads, head size) of the cache.
    vocab_size    width of the logits.
    row_multiple  rows of tokens and logits come in multiples of this.
    """

    kv_shape: tuple[int, int, int]
    vocab_size: int
    row_multiple: int

    def new_caches(self, pages: int, page_size: int) -> list[LayerCache]:
        """The KV cache of every layer, all zeros, of the dtype that the model was loaded for."""

    def forward(self, step: ModelInput, caches: list[LayerCache]) -> Tensor:
        """Logits [R, V] float32 of ``step.logit_rows``; writes the step's keys and values into ``caches``."""


class MLP(Protocol):
    """The second half of a block."""

    def input_layout(self, m: int) -> ActivationLayout | None:
        """The layout in which M rows of the input are best; see LinearLayer."""

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, hidden], as a Tensor or in the layout of ``input_layout(T)`` -> [T, hidden]."""


@dataclass
class GatedMLP:
    """down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202); ``gate_up`` is both, gate's outputs first."""

    gate_up: LinearLayer
    down: LinearLayer
    act: Activation

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See MLP."""
        return self.gate_up.input_layout(m)

    def __call__(self, x: LinearInput) -> Tensor:
        """See MLP."""
        both = self.gate_up(x)
        return self.down(self.act.gated(both, self.down.input_layout(len(both))))


@dataclass
class PlainMLP:
    """second(act(first(x)))."""

    first: LinearLayer
    second: LinearLayer
    act: Activation

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See MLP."""
        return self.first.input_layout(m)

    def __call__(self, x: LinearInput) -> Tensor:
        """See MLP."""
        first = self.first(x)
        return self.second(self.act(first, self.second.input_layout(len(first))))


@dataclass
class Block:
    """One transformer layer: attention and MLP, each with a residual, normalized before (or after: OPT-350m)."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP
    norm_first: bool = True

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden], which is modified, and a residual that has still to be added to it -> the same for the next
        block. positions [T] int64.
        """
        if self.norm_first:
            normed = self.attention_norm(x, residual, self.attention.input_layout(len(x)))
            attended = self.attention(normed, positions, cache, context)
            return x, self.mlp(self.mlp_norm(x, attended, self.mlp.input_layout(len(x))))
        assert residual is None
        x = _plain(self.attention_norm(self.attention(x, positions, cache, context), x))
        return _plain(self.mlp_norm(self.mlp(x), x)), None


def _plain(x: LinearInput) -> Tensor:
    """What an operation returns that was given no layout."""
    assert isinstance(x, Tensor)
    return x


@dataclass
class Decoder:
    """A decoder-only language model: embedding, blocks, final norm, head.

    ops              that its layers are bound to.
    positions        the embedding of learned positions, or None with rotary ones.
    project_in, out  between the embedding's width and the blocks' (OPT-350m), or None.
    """

    config: ModelConfig
    ops: Ops
    embedding: EmbeddingLayer
    blocks: list[Block]
    norm: Norm | None
    head: LinearLayer
    positions: EmbeddingLayer | None = None
    project_in: LinearLayer | None = None
    project_out: LinearLayer | None = None

    def __post_init__(self) -> None:
        self._select_rows = self.ops.row_selection()
        self.row_multiple = self.ops.row_multiple

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(self, step: ModelInput, caches: list[LayerCache]) -> Tensor:
        """See Model.forward."""
        return self.compute(step, caches).float()

    def new_caches(self, pages: int, page_size: int) -> list[LayerCache]:
        """See Model.new_caches."""
        return [block.attention.new_cache(pages, page_size) for block in self.blocks]

    def compute(self, step: ModelInput, caches: list[LayerCache]) -> Tensor:
        """The logits in the activation dtype: what can be recorded (executor/cpu_program.py)."""
        x, residual = self.embedding(step.token_ids), None
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            residual = self.positions(step.positions)
        for block, cache in zip(self.blocks, caches, strict=True):
            if not block.norm_first and residual is not None:
                x, residual = x + residual, None
            x, residual = block(x, residual, step.positions, cache, step.context)
        x = self._select_rows(x, step.logit_rows)
        residual = None if residual is None else self._select_rows(residual, step.logit_rows)
        if self.norm is not None:
            x = _plain(self.norm(x, residual))
        elif residual is not None:
            x = x + residual
        if self.project_out is not None:
            x = self.project_out(x)
        return self.head(x)
