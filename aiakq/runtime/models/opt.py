"""OPT: layer norms, learned positions, a ReLU MLP, biases everywhere (Zhang et al. 2022, arXiv:2205.01068)."""

from __future__ import annotations

from dataclasses import replace

from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import LayerNormBuilder, Names
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, Weights

#: Index of position 0 in the table of learned positions.
POSITION_OFFSET = 2


class OPTBuilder(LayerNormBuilder):
    """OPT. OPT-350m has norms after the residual sums, and an embedding narrower than its layers."""

    names = Names(
        embedding="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        norm="model.decoder.final_layer_norm",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        output="self_attn.out_proj",
        gate_up=("fc1",),
        down="fc2",
    )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = self.mlp_bias = bool(config.raw.get("enable_bias", True))
        self._norm_first = bool(config.raw.get("do_layer_norm_before", True))
        self._embedding_width = config.raw.get("word_embed_proj_dim", config.hidden_size)

    @property
    def embedding_width(self) -> int:
        """Width of the embedding, which is narrower than the layers in OPT-350m."""
        return int(self._embedding_width)

    def head(self) -> LinearLayer:
        """Return the output layer, if it is not tied."""
        return self.weights.linear(self.names.head, self.config.vocab_size, self._embedding_width)

    def positions(self) -> EmbeddingLayer:
        """Return the embedding of learned positions."""
        config = self.config
        rows = config.max_position + POSITION_OFFSET
        table = self.weights.tensor("model.decoder.embed_positions.weight", rows, config.hidden_size)
        return self.ops.embedding(table[POSITION_OFFSET:])

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None, since positions are learned."""
        return None

    def project_in(self) -> LinearLayer | None:
        """Return the projection from the embedding's width to that of the layers, or None."""
        D, width = self.config.hidden_size, self._embedding_width
        return self.weights.linear("model.decoder.project_in", D, width) if width != D else None

    def project_out(self) -> LinearLayer | None:
        """Return the projection from the layers' width to that of the embedding, or None."""
        D, width = self.config.hidden_size, self._embedding_width
        return self.weights.linear("model.decoder.project_out", width, D) if width != D else None

    def final_norm(self) -> Norm | None:
        """Return the final norm; None if the layers end with a norm."""
        removed = self.config.raw.get("_remove_final_layer_norm", False)
        return super().final_norm() if self._norm_first and not removed else None

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer."""
        block = super().block(layer)
        assert isinstance(block, Block)
        return replace(block, norm_first=self._norm_first)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """OPTForCausalLM from ``weights``."""
    return OPTBuilder(config, weights).build()
