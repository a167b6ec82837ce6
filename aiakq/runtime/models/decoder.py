"""Decoder: the transformer blocks shared by all native families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.lora import AdaptedLinear
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.types import ActivationLayout, AttentionContext, LayerCache, LinearInput
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.layer_inputs import LayerEnd, LayerInputs
from aiakq.runtime.layers.mlp import MLP as MLP
from aiakq.runtime.layers.mlp import GatedMLP as GatedMLP
from aiakq.runtime.layers.mlp import PlainMLP as PlainMLP
from aiakq.runtime.layers.rotary import GridRotary
from aiakq.runtime.lora.layers import AdaptableLayers
from aiakq.runtime.models.interface import ModelInput, StageOutput
from aiakq.runtime.models.stage import Stage
from aiakq.runtime.models.weights import Weights as Weights


class FamilyModule(Protocol):
    """A module that builds the models of one or several architectures."""

    def build(self, config: ModelConfig, weights: Weights) -> Decoder:
        """Build the model, or the stage ``weights.stage``. Raises ``unsupported`` for settings it does not support."""


class Mixer(Protocol):
    """The token mixer of a block: attention or a recurrent layer."""

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return the preferred layout for M input rows; see LinearLayer."""

    def __call__(self, x: LinearInput, positions: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """x [T, hidden] and positions [T] int64 -> [T, hidden]; updates ``cache``."""

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token in the KV cache, for keys and values of ``dtype``."""

    def state_bytes(self) -> int:
        """Return the bytes of one sequence's recurrent state."""

    def new_cache(self, pages: int, page_size: int, state_rows: int) -> LayerCache:
        """Allocate the cache of this layer, filled with zeros: ``pages`` pages, or ``state_rows`` states."""


class DecoderLayer(Protocol):
    """A transformer layer: attention (or a recurrent layer) and MLP, each with a residual connection."""

    @property
    def attention(self) -> Mixer | None:
        """Attention, or the recurrent layer in its place, or None."""

    @property
    def mlp(self) -> MLP | None:
        """The MLP, or None."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """Return x [T, hidden] and a residual [T, hidden] or None for the next layer, whose norm adds them in one
        operation.

        x          input [T, hidden], which is modified.
        residual   [T, hidden] still to be added to x, or None.
        positions  [T] int64.
        """


#: A norm, or a Scaling: [T, hidden] -> [T, hidden].
Rescale: TypeAlias = Callable[[Tensor], LinearInput]


@dataclass
class Block:
    """Norms before attention and MLP, or after the residual sum if not ``norm_first`` (OPT-350m).

    after_attention, after_mlp  applied to the output before the residual sum: a norm (Gemma 2), a multiplier (Granite),
                                or None.
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
    """Norms of the outputs of attention and MLP, and none before them (OLMo 2).

    add  a Scaling by one, used for the residual sum.
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
class NormedResidualBlock:
    """Norms before attention and MLP, whose outputs are the residuals, too (MiniMax-01).

    attention_factors, mlp_factors  of the residual and of the output of attention or the MLP.
    """

    attention_norm: Norm
    attention: Mixer
    mlp_norm: Norm
    mlp: MLP
    attention_factors: tuple[Scaling, Scaling]
    mlp_factors: tuple[Scaling, Scaling]

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden]; see DecoderLayer."""
        normed = _plain(self.attention_norm(x, residual))
        attended = self.attention(normed, positions, cache, context)
        (alpha, beta), (mlp_alpha, mlp_beta) = self.attention_factors, self.mlp_factors
        normed = _plain(self.mlp_norm(beta(attended, alpha(normed), out=attended)))
        return mlp_beta(self.mlp(normed), mlp_alpha(normed)), None


@dataclass
class ParallelBlock:
    """Attention and MLP in parallel, with a shared input norm or, with ``mlp_norm``, one each (GPT-NeoX).

    add  a Scaling by one, used for the residual sum.
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
        layout = None if self.mlp_norm is None else self.attention.input_layout(len(x))
        normed = self.attention_norm(x, residual, layout)
        attended = self.attention(normed, positions, cache, context)
        if self.mlp_norm is not None:
            normed = self.mlp_norm(x, None, self.mlp.input_layout(len(x)))
        out = self.mlp(normed)
        return x, self.add(out, attended, out=out)


@dataclass
class MixerBlock:
    """A norm and a mixer, without an MLP (Mamba 2)."""

    attention_norm: Norm
    attention: Mixer
    mlp: None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden]; see DecoderLayer."""
        normed = self.attention_norm(x, residual, self.attention.input_layout(len(x)))
        return x, self.attention(normed, positions, cache, context)


@dataclass
class MLPBlock:
    """A norm and an MLP, without a mixer (Nemotron-H)."""

    mlp_norm: Norm
    mlp: MLP
    attention: None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden]; see DecoderLayer."""
        return x, self.mlp(self.mlp_norm(x, residual, self.mlp.input_layout(len(x))))


def _rescaled(x: Tensor, rescale: Rescale | None) -> Tensor:
    return x if rescale is None else _plain(rescale(x))


def _plain(x: LinearInput) -> Tensor:
    """Narrow the type of a result that was computed without a requested layout."""
    assert isinstance(x, Tensor)
    return x


@dataclass
class Decoder:
    """A decoder-only language model: embedding, blocks, final norm, head.

    ops              operations of the device.
    stage            range of layers in ``blocks``; parts before the blocks exist in the first stage only, parts after
                     them in the last stage only.
    head             output layer for logits or scores; None in the last stage if hidden states are returned.
    output_width     number of columns of the output per token.
    positions        embedding of learned positions, or None.
    project_in, project_out  projections between the embedding's width and the blocks' (OPT-350m), or None.
    after_embedding  multiplier (Gemma) or norm (Bloom) of the embeddings, or None.
    after_head       multiplier or softcap of the logits (Cohere, Gemma 2), or None.
    adapters         layers that support LoRA adapters; None if LoRA is disabled.
    aux_layers       layers whose inputs are stored in ``ModelInput.aux_hidden_states`` for an EAGLE-3 head; the number
                     of layers stands for the output of the last one.
    grid_rotary      rows of the rotary tables for tokens with three positions; None if all tokens have one.
    layer_inputs     what every layer reads of a token besides hidden states, or None.
    layer_ends       what follows each of ``blocks``; empty in families without.
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
    grid_rotary: GridRotary | None = None
    layer_inputs: LayerInputs | None = None
    layer_ends: Sequence[LayerEnd] = ()
    _sum: Scaling = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._select_rows = self.ops.row_selection()
        for layer in (self.project_out, self.head):
            if isinstance(layer, AdaptedLinear):
                layer.of_logit_rows()
        self.sampler = self.ops.sampler()
        self.row_multiple = self.ops.row_multiple
        self.short_start = 0 if self.config.short_context is None else self.config.num_positions
        first, sources = self.stage.first, self.config.cache_sources
        #: The index of the cache of each block.
        self._cache_of = [sources.get(first + number, first + number) - first for number in range(len(self.blocks))]

    @property
    def takes_hidden(self) -> bool:
        """Whether steps come with hidden states."""
        return not self.stage.is_first

    @property
    def variant(self) -> bool:
        """Whether the current step has rows with adapters, by which recordings of steps are told apart."""
        return self.adapters is not None and self.adapters.are_used

    def recording(self) -> AbstractContextManager[None]:
        """While open, operations are recorded for any rows with adapters, if the current step has some."""
        if self.adapters is None or not self.adapters.are_used:
            return nullcontext()
        return self.adapters.for_any_rows()

    def return_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Return the inputs of ``layers`` with every step; comes before steps are captured."""
        self.aux_layers, self._sum = layers, self.ops.scaling()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(self, step: ModelInput, caches: list[LayerCache]) -> Tensor | StageOutput:
        """Return logits [R, V] float32, or the hidden states for the next stage; see Model.forward."""
        output = self.compute(step, caches)
        return output.float() if isinstance(output, Tensor) else output

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """See Model.kv_bytes_per_token."""
        return sum(mixer.cache_bytes(dtype) for mixer in self._mixers() if mixer is not None)

    def state_bytes(self) -> int:
        """See Model.state_bytes."""
        return sum(mixer.state_bytes() for mixer in self._mixers() if mixer is not None)

    def mixture_elements(self) -> int:
        """See Model.mixture_elements."""
        parts = [part for block in self.blocks for part in (block, block.mlp)]
        largest = max((getattr(part, "elements_per_token", 0) for part in parts), default=0)
        return largest + (0 if self.layer_inputs is None else self.layer_inputs.elements_per_token)

    def new_caches(self, pages: int, page_size: int, state_rows: int = 1) -> list[LayerCache]:
        """See Model.new_caches."""
        return [() if mixer is None else mixer.new_cache(pages, page_size, state_rows) for mixer in self._mixers()]

    def _mixers(self) -> list[Mixer | None]:
        return [block.attention for block in self.blocks]

    def compute(self, step: ModelInput, caches: list[LayerCache]) -> Tensor | StageOutput:
        """Return the logits [R, V] in the activation dtype, or the hidden states for the next stage.

        This is the part of ``forward`` that executor/cpu_program.py records.
        """
        hidden = self._embedded(step) if step.hidden is None else step.hidden
        x, residual = hidden.x, hidden.residual
        inputs = None if self.layer_inputs is None else self.layer_inputs(step.token_ids, x)
        for layer, (block, cache) in enumerate(zip(self.blocks, self._cache_of, strict=True)):
            if layer in self.aux_layers:
                step.aux_hidden_states.append(self._sum(x, residual))
            x, residual = block(x, residual, step.positions, caches[cache], step.context)
            if self.layer_ends:
                x, residual = self.layer_ends[layer](x, residual, inputs)
            for rows in step.input_rows:
                x, residual = rows.add(self.stage.first + layer, x, residual)
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
        """Return the input of the first block."""
        assert self.embedding is not None, "a later stage needs the hidden states of the previous one"
        x = _rescaled(self.embedding(step.token_ids), self.after_embedding)
        if self.project_in is not None:
            x = self.project_in(x)
        for replaced in step.input_rows:
            x = replaced.embed(x)
        return StageOutput(x, None if self.positions is None else self.positions(step.positions))
