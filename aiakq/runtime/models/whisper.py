"""Whisper's decoder: layer norms, learned positions, attention to the states of an encoder of audio (Radford et al.
2022, arXiv:2212.04356).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from torch import Tensor

from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import AttentionContext, AttentionSpec, RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import Attention, LayerCache
from aiakq.runtime.layers.cross_attention import CrossAttention, EncoderStates
from aiakq.runtime.layers.linear import ConcatLinear
from aiakq.runtime.models.builder import LayerNormBuilder, Names
from aiakq.runtime.models.decoder import MLP, Decoder, DecoderLayer, Weights


@dataclass
class CrossBlock:
    """Self-attention, cross-attention and MLP, each behind a norm.

    layer   number of the block.
    states  of the encoder, and the layers that read them.
    """

    attention_norm: Norm
    attention: Attention
    cross_norm: Norm
    states: EncoderStates
    layer: int
    mlp_norm: Norm
    mlp: MLP

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden]; see DecoderLayer."""
        rows, cross = len(x), self.states.layers[self.layer]
        normed = self.attention_norm(x, residual, self.attention.input_layout(rows))
        attended = self.attention(normed, positions, cache, context)
        crossed = self.states.attend(self.layer, self.cross_norm(x, attended, cross.input_layout(rows)))
        return x, self.mlp(self.mlp_norm(x, crossed, self.mlp.input_layout(rows)))


@dataclass
class CrossDecoder(Decoder):
    """A decoder whose layers read the states of an encoder.

    encoder_states  what the tokens of the next step read.
    """

    encoder_states: EncoderStates = field(default_factory=lambda: EncoderStates(0))


class WhisperBuilder(LayerNormBuilder):
    """Whisper. Keys have no biases, queries and values do."""

    names = Names(
        embedding="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        norm="model.decoder.layer_norm",
        head="proj_out",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        output="self_attn.out_proj",
        gate_up=("fc1",),
        down="fc2",
    )
    output_bias = mlp_bias = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.states = EncoderStates(int(config.raw["max_source_positions"]))

    def build(self) -> CrossDecoder:
        """Build the model, which is not split into stages."""
        decoder = super().build()
        parts = {part.name: getattr(decoder, part.name) for part in fields(decoder) if part.init}
        return CrossDecoder(**parts, encoder_states=self.states)

    def positions(self) -> EmbeddingLayer:
        """Return the embedding of learned positions."""
        config = self.config
        table = self.weights.tensor("model.decoder.embed_positions.weight", config.max_position, config.hidden_size)
        return self.ops.embedding(table)

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None, since positions are learned."""
        return None

    def qkv(self, layer: int) -> LinearLayer:
        """Return the projections to queries, keys and values."""
        widths = zip(self.names.qkv, self.qkv_widths(), (True, False, True), strict=True)
        return ConcatLinear([self._projection(layer, name, width, bias) for name, width, bias in widths])

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer."""
        attention, mlp = self.attention(layer), self.mlp(layer)
        assert isinstance(attention, Attention)
        self.states.layers.append(self._cross_attention(layer))
        names = (self.names.attention_norm, "encoder_attn_layer_norm", self.names.mlp_norm)
        before, between, last = (self.norm(self.layer_name(layer, name)) for name in names)
        return CrossBlock(before, attention, between, self.states, layer, last, mlp)

    def _cross_attention(self, layer: int) -> CrossAttention:
        heads, size = self.config.num_heads, self.config.head_dim
        spec = AttentionSpec(heads, heads, size, scale=size**-0.5)
        biases = {"q_proj": True, "k_proj": False, "v_proj": True, "out_proj": True}
        query, key, value, output = (
            self._projection(layer, f"encoder_attn.{name}", heads * size, bias) for name, bias in biases.items()
        )
        return CrossAttention(query, key, value, output, spec, self.ops)

    def _projection(self, layer: int, name: str, width: int, bias: bool) -> LinearLayer:
        return self.weights.linear(self.layer_name(layer, name), width, self.config.hidden_size, bias=bias)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """WhisperForConditionalGeneration from ``weights``, without its encoder."""
    return WhisperBuilder(config, weights).build()
