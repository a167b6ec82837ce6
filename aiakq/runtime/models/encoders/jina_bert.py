"""JinaBERT (Günther et al. 2023, arXiv:2310.19923): BERT with ALiBi in both directions and gated MLPs.

Two classes of its authors share a name. The second, of jina-embeddings-v2-base-code and the first rerankers, has
norms of queries and keys, and a further norm behind attention; its files are recognized by these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import ActivationLayout, LinearInput, RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.encoder_attention import EncoderAttention, PositionBias
from aiakq.runtime.models.alibi import slopes
from aiakq.runtime.models.builder import Names
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, Weights
from aiakq.runtime.models.encoders import OUTER
from aiakq.runtime.models.encoders.gte import GteBuilder

#: feed_forward_type -> activation of the gate.
_GATES = {"geglu": "gelu", "reglu": "relu"}


class DistanceBias:
    """A bias of scores that falls with the distance of query and key, by ``slopes`` [H] (arXiv:2108.12409)."""

    def __init__(self, slopes: Tensor) -> None:
        self._slopes = slopes

    def __call__(self, start: int, end: int, length: int) -> Tensor:
        """See PositionBias."""
        at = torch.arange(length, device=self._slopes.device)
        return -self._slopes[:, None, None] * (at[None, :] - at[start:end, None]).abs()


class JinaBertBuilder(GteBuilder):
    """JinaBERT of jina-embeddings-v2."""

    names = Names(
        embedding="embeddings.word_embeddings",
        layers="encoder.layer",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        output="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        gate_up=("mlp.gated_layers",),
        down="mlp.wo",
        mlp_norm="mlp.layernorm",
    )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(replace(config, activation=_GATES[config.raw["feed_forward_type"]]), weights)
        self._bias = DistanceBias(slopes(config.num_heads).to(self.ops.device))

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None: positions are a bias of scores."""
        return None

    def position_bias(self) -> PositionBias:
        """See EncoderBuilder."""
        return self._bias

    def gate_up(self, layer: int, width: int, inner: int) -> LinearLayer:
        """Return the first layer of an MLP, the gate's outputs first, as files have them."""
        return self.weights.linear(self.layer_name(layer, self.names.gate_up[0]), 2 * inner, width)


@dataclass
class TwoNorms:
    """Two norms in a row, both of a sum with the same residual."""

    first: Norm
    second: Norm

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, layout: ActivationLayout | None = None
    ) -> LinearInput:
        """See Norm."""
        normed = self.first(x, residual)
        assert isinstance(normed, Tensor)
        return self.second(normed, residual, layout)


class NormedJinaBertBuilder(JinaBertBuilder):
    """JinaBERT with norms of queries and keys."""

    names = replace(
        JinaBertBuilder.names, gate_up=("mlp.up_gated_layer",), down="mlp.down_layer", mlp_norm="layer_norm_2"
    )

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer."""
        first, second, mlp_norm = (
            self.norm(self.layer_name(layer, name))
            for name in (self.names.attention_norm, "layer_norm_1", self.names.mlp_norm)
        )
        return Block(TwoNorms(first, second), self.attention(layer), mlp_norm, self.mlp(layer), norm_first=False)

    def attention(self, layer: int) -> EncoderAttention:
        """Return the attention of a layer, with norms of all heads' queries and keys."""
        attention = super().attention(layer)
        query, key = (self.norm(self.layer_name(layer, f"attention.self.layer_norm_{name}")) for name in "qk")
        attention.norms = query, key
        return attention

    def gate_up(self, layer: int, width: int, inner: int) -> LinearLayer:
        """Return the first layer of an MLP, the gate's outputs first; files have them behind the others."""
        return GteBuilder.gate_up(self, layer, width, inner)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """See FamilyModule."""
    has_norms = any(weights.has(f"{outer}encoder.layer.0.layer_norm_1.weight") for outer in ("", *OUTER))
    return (NormedJinaBertBuilder if has_norms else JinaBertBuilder)(config, weights).build()
