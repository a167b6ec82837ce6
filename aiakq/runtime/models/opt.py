"""OPT: layer norms, learned positions, plain ReLU MLP, biases everywhere (Zhang et al. 2022, arXiv:2205.01068)."""

from __future__ import annotations

from dataclasses import replace

from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import LayerNormBuilder, Names
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, Weights

#: Rows before position 0 in the table of learned positions.
POSITION_OFFSET = 2


class OPTBuilder(LayerNormBuilder):
    """OPT. The smallest but one (350m) has norms after the sums, and an embedding narrower than its layers."""

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
        """Columns of the embedding, fewer than those of the layers in the smallest but one."""
        return int(self._embedding_width)

    def head(self) -> LinearLayer:
        """The output layer that is not tied."""
        return self.weights.linear(self.names.head, self.config.vocab_size, self._embedding_width)

    def positions(self) -> EmbeddingLayer:
        """The table of learned positions."""
        config = self.config
        rows = config.max_position + POSITION_OFFSET
        table = self.weights.tensor("model.decoder.embed_positions.weight", rows, config.hidden_size)
        return self.ops.embedding(table[POSITION_OFFSET:])

    def rotary(self, layer: int) -> RotaryTables | None:
        """None: positions are learned."""
        return None

    def project_in(self) -> LinearLayer | None:
        """From the embedding's width to that of the layers."""
        D, width = self.config.hidden_size, self._embedding_width
        return self.weights.linear("model.decoder.project_in", D, width) if width != D else None

    def project_out(self) -> LinearLayer | None:
        """From the layers' width to that of the embedding."""
        D, width = self.config.hidden_size, self._embedding_width
        return self.weights.linear("model.decoder.project_out", width, D) if width != D else None

    def final_norm(self) -> Norm | None:
        """None after layers that end with a norm."""
        removed = self.config.raw.get("_remove_final_layer_norm", False)
        return super().final_norm() if self._norm_first and not removed else None

    def block(self, layer: int) -> DecoderLayer:
        """One layer."""
        block = super().block(layer)
        assert isinstance(block, Block)
        return replace(block, norm_first=self._norm_first)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """OPTForCausalLM from ``weights``."""
    return OPTBuilder(config, weights).build()
