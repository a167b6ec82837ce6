"""Decoder: the transformer blocks shared by all native families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.lora import AdaptedLinear
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.sampling import Sampler
from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.types import ActivationLayout, AttentionContext, LinearInput
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.lora.layers import AdaptableLayers
from aiakq.runtime.models.stage import Stage


@dataclass
class StageOutput:
    """What a stage passes on: ``x`` [T, hidden], and a ``residual`` [T, hidden] or None that has still to be added."""

    x: Tensor
    residual: Tensor | None


def whole_logits(found: Tensor | StageOutput) -> Tensor:
    """The logits [R, V] that a model which is not one of several stages returned."""
    assert isinstance(found, Tensor), "the head is in another stage"
    return found


@dataclass
class ModelInput:
    """One step's tokens, flattened.

    token_ids   [T] int64.
    positions   [T] int64.
    context     where their keys and values are in the cache.
    logit_rows  [R] int64, the rows of T whose logits are wanted.
    hidden      what the stage before, or the target model of an EAGLE-3 head, made of the tokens. It is modified.
    aux_hidden_states  filled in by the model: [T, hidden] before each of its ``aux_layers``.
    """

    token_ids: Tensor
    positions: Tensor
    context: AttentionContext
    logit_rows: Tensor
    hidden: StageOutput | None = None
    aux_hidden_states: list[Tensor] = field(default_factory=list)


class Weights(Protocol):
    """Where a family's ``build`` gets its tensors and layers from; see aiakq/runtime/loader/weights.py.

    stage  the layers to build; None: all.
    """

    stage: Stage | None

    @property
    def ops(self) -> Ops:
        """The operations of the device, which bind the layers without large weights."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor [*shape] in ``dtype``, the activation dtype if None, on the device. Raises ``tensor_mismatch`` for
        another shape.
        """

    def weight(self, name: str, n: int, k: int) -> Tensor:
        """The weight [N, K] of the linear layer ``name`` as floats, dequantized if need be, for another use than its
        own: to multiply it with something else, or to take parts of it.
        """

    def linear(self, name: str, n: int, k: int, *, bias: bool = False, rows: Tensor | None = None) -> LinearLayer:
        """The linear layer ``name`` with N outputs and K inputs, dense or quantized as the checkpoint holds it.

        rows  [N] int64: output i is row rows[i] of the stored weight; for projections stored in another order.
        """

    def stacked(self, parts: Sequence[tuple[str, int]], k: int, *, bias: bool = False) -> LinearLayer:
        """Several linear layers (name, N) with the same K inputs as one, outputs in the order given."""

    def dense(self, weight: Tensor, bias: Tensor | None = None) -> LinearLayer:
        """A linear layer of a weight [N, K] that ``tensor`` returned."""

    def adaptable(
        self,
        layer: LinearLayer,
        name: str,
        n: int,
        k: int,
        weight: Callable[[], Tensor],
        bias: Tensor | None = None,
    ) -> LinearLayer:
        """``layer``, which ``dense`` or ``embedding`` made, with adapters of the module ``name``, if there may be any.

        weight  gives its weight [N, K] again; bias [N].
        """

    def embedding(self, name: str, vocab: int, width: int, *, tied: bool) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """The embedding of the table ``name`` [V, D], and the head if it is tied to it."""


class Model(Protocol):
    """What the executor needs of a model, native or through transformers.

    sampler       of its device.
    vocab_size    width of the logits.
    row_multiple  rows of tokens and logits come in multiples of this.
    """

    sampler: Sampler
    vocab_size: int
    row_multiple: int

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token in the caches of all layers, if they are of ``dtype``."""

    def state_bytes(self) -> int:
        """Bytes of a sequence's state in all recurrent layers; 0 if there are none."""

    def new_caches(self, pages: int, page_size: int, state_rows: int = 1) -> list[LayerCache]:
        """The KV cache of every layer, all zeros, of the dtype that the model was loaded for; of a recurrent layer
        ``state_rows`` states.
        """

    def forward(self, step: ModelInput, caches: list[LayerCache]) -> Tensor | StageOutput:
        """Logits [R, V] float32 of ``step.logit_rows``, or what the next stage needs; writes the step's keys and values
        into ``caches``.
        """


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

    def __post_init__(self) -> None:
        self.gate_up.feeds(self.down, parts=2)

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

    def __post_init__(self) -> None:
        self.first.feeds(self.second, parts=1)

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See MLP."""
        return self.first.input_layout(m)

    def __call__(self, x: LinearInput) -> Tensor:
        """See MLP."""
        first = self.first(x)
        return self.second(self.act(first, self.second.input_layout(len(first))))


class Mixer(Protocol):
    """The first half of a block, which reads other tokens of the sequence: attention, or a recurrent layer."""

    def input_layout(self, m: int) -> ActivationLayout | None:
        """The layout in which M rows of the input are best; see LinearLayer."""

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64 -> [T, hidden]; writes into ``cache`` what later tokens read."""

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token in the cache, if keys and values are of ``dtype``."""

    def state_bytes(self) -> int:
        """Bytes of a sequence's state."""

    def new_cache(self, pages: int, page_size: int, state_rows: int) -> LayerCache:
        """A cache for this layer, all zeros: of ``pages``, or of ``state_rows`` states."""


class DecoderLayer(Protocol):
    """One transformer layer: attention, or a recurrent layer in its place, and MLP, each added to what came in."""

    @property
    def attention(self) -> Mixer:
        """Its first half."""

    @property
    def mlp(self) -> MLP | None:
        """Its second half; None if it has none."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden], which is modified, and a residual [T, hidden] that has still to be added to it -> the same for
        the next layer, whose norm adds them in one operation. positions [T] int64.
        """


#: A norm, or a Scaling: [T, hidden] -> [T, hidden].
Rescale: TypeAlias = Callable[[Tensor], LinearInput]


@dataclass
class Block:
    """Norms before attention and MLP (or after the sum: OPT-350m).

    after_attention, after_mlp  change what is added: a second norm (Gemma 2) or a multiplier (Granite), or None.
    """

    attention_norm: Norm
    attention: Mixer
    mlp_norm: Norm
    mlp: MLP
    norm_first: bool = True
    after_attention: Rescale | None = None
    after_mlp: Rescale | None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden]; see DecoderLayer."""
        if self.norm_first:
            normed = self.attention_norm(x, residual, self.attention.input_layout(len(x)))
            attended = _rescaled(self.attention(normed, positions, cache, context), self.after_attention)
            out = self.mlp(self.mlp_norm(x, attended, self.mlp.input_layout(len(x))))
            return x, _rescaled(out, self.after_mlp)
        if residual is not None:
            x = x + residual
        x = _plain(self.attention_norm(self.attention(x, positions, cache, context), x))
        return _plain(self.mlp_norm(self.mlp(x), x)), None


@dataclass
class OutputNormBlock:
    """Norms of what attention and MLP return, and none before them (OLMo 2).

    add  a Scaling that changes nothing else.
    """

    attention: Mixer
    attention_norm: Norm
    mlp: MLP
    mlp_norm: Norm
    add: Scaling

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden]; see DecoderLayer."""
        if residual is not None:
            x = self.add(x, residual, out=x)
        attended = _plain(self.attention_norm(self.attention(x, positions, cache, context)))
        x = self.add(x, attended, out=x)
        return x, _plain(self.mlp_norm(self.mlp(x)))


@dataclass
class ParallelBlock:
    """Attention and MLP side by side, from the same norm or from one each (``mlp_norm``: GPT-NeoX).

    add  a Scaling that changes nothing else.
    """

    attention_norm: Norm
    attention: Mixer
    mlp: MLP
    add: Scaling
    mlp_norm: Norm | None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden]; see DecoderLayer."""
        own = self.mlp_norm is not None
        normed = self.attention_norm(x, residual, self.attention.input_layout(len(x)) if own else None)
        attended = self.attention(normed, positions, cache, context)
        if self.mlp_norm is not None:
            normed = self.mlp_norm(x, None, self.mlp.input_layout(len(x)))
        out = self.mlp(normed)
        return x, self.add(out, attended, out=out)


@dataclass
class MixerBlock:
    """A norm and attention, or what takes its place, without an MLP (Mamba 2)."""

    attention_norm: Norm
    attention: Mixer
    mlp: None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden]; see DecoderLayer."""
        normed = self.attention_norm(x, residual, self.attention.input_layout(len(x)))
        return x, self.attention(normed, positions, cache, context)


def _rescaled(x: Tensor, rescale: Rescale | None) -> Tensor:
    return x if rescale is None else _plain(rescale(x))


def _plain(x: LinearInput) -> Tensor:
    """What an operation returns that was given no layout."""
    assert isinstance(x, Tensor)
    return x


@dataclass
class Decoder:
    """A decoder-only language model: embedding, blocks, final norm, head.

    ops              that its layers are bound to.
    stage            the layers that ``blocks`` are; the first stage alone has what comes before them, the last one what
                     comes after.
    positions        the embedding of learned positions, or None with rotary ones.
    project_in, out  between the embedding's width and the blocks' (OPT-350m), or None.
    after_embedding  a multiplier (Gemma) or a norm (Bloom) of the embeddings, or None.
    after_head       multiplies or caps logits (Cohere, Gemma 2), or None.
    adapters         of its layers; None: there may be none.
    head             makes logits, or scores; None in the last stage: hidden states are returned.
    output_width     columns of what is returned for a token.
    aux_layers       layers whose inputs an EAGLE-3 head reads, the number of layers for the last one's output; in
                     ``ModelInput.aux_hidden_states``.
    """

    config: ModelConfig
    ops: Ops
    stage: Stage
    embedding: EmbeddingLayer | None
    blocks: Sequence[DecoderLayer]
    norm: Norm | None
    head: LinearLayer | None
    output_width: int
    positions: EmbeddingLayer | None = None
    project_in: LinearLayer | None = None
    project_out: LinearLayer | None = None
    after_embedding: Rescale | None = None
    after_head: Rescale | None = None
    adapters: AdaptableLayers | None = None
    aux_layers: tuple[int, ...] = ()
    _sum: Scaling = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._select_rows = self.ops.row_selection()
        for layer in (self.project_out, self.head):
            if isinstance(layer, AdaptedLinear):
                layer.of_logit_rows()
        self.sampler = self.ops.sampler()
        self.row_multiple = self.ops.row_multiple

    @property
    def takes_hidden(self) -> bool:
        """Whether steps come with hidden states."""
        return not self.stage.is_first

    def return_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Return the inputs of ``layers`` with every step; comes before steps are captured."""
        self.aux_layers, self._sum = layers, self.ops.scaling()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(self, step: ModelInput, caches: list[LayerCache]) -> Tensor | StageOutput:
        """Logits [R, V] float32, or the hidden states for the next stage; see Model.forward."""
        found = self.compute(step, caches)
        return found.float() if isinstance(found, Tensor) else found

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """See Model.kv_bytes_per_token."""
        return sum(block.attention.cache_bytes(dtype) for block in self.blocks)

    def state_bytes(self) -> int:
        """See Model.state_bytes."""
        return sum(block.attention.state_bytes() for block in self.blocks)

    def new_caches(self, pages: int, page_size: int, state_rows: int = 1) -> list[LayerCache]:
        """See Model.new_caches."""
        return [block.attention.new_cache(pages, page_size, state_rows) for block in self.blocks]

    def compute(self, step: ModelInput, caches: list[LayerCache]) -> Tensor | StageOutput:
        """The logits [R, V] in the activation dtype, or the hidden states: what can be recorded
        (executor/cpu_program.py).
        """
        hidden = self._embedded(step) if step.hidden is None else step.hidden
        x, residual = hidden.x, hidden.residual
        for layer, (block, cache) in enumerate(zip(self.blocks, caches, strict=True)):
            if layer in self.aux_layers:
                step.aux_hidden_states.append(self._sum(x, residual))
            x, residual = block(x, residual, step.positions, cache, step.context)
        if len(self.blocks) in self.aux_layers:
            step.aux_hidden_states.append(self._sum(x, residual))
        if not self.stage.is_last:
            return StageOutput(x, residual)
        x = self._select_rows(x, step.logit_rows)
        residual = None if residual is None else self._select_rows(residual, step.logit_rows)
        if self.norm is not None:
            x = _plain(self.norm(x, residual))
        elif residual is not None:
            x = x + residual
        if self.project_out is not None:
            x = self.project_out(x)
        return x if self.head is None else _rescaled(self.head(x), self.after_head)

    def _embedded(self, step: ModelInput) -> StageOutput:
        """What the first block gets."""
        assert self.embedding is not None, "a later stage needs the hidden states of the one before"
        x = self.embedding(step.token_ids)
        if self.after_embedding is not None:
            x = _plain(self.after_embedding(x))
        if self.project_in is not None:
            x = self.project_in(x)
        return StageOutput(x, None if self.positions is None else self.positions(step.positions))
