"""EncoderBuilder: builds BERT; families override names, attributes and methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.errors import error
from aiakq.kernels.ops.activation import FUNCTIONS
from aiakq.kernels.ops.norm import Norm
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import function_name
from aiakq.runtime.layers.encoder_attention import EncoderAttention, PositionBias
from aiakq.runtime.models.builder import LayerNormBuilder, Names
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, Weights
from aiakq.runtime.models.encoders import OUTER
from aiakq.runtime.models.encoders.encoder import (
    EncoderEmbedding,
    EncoderModel,
    HeadLayer,
    PooledHead,
    ScoreHead,
)
from aiakq.runtime.models.stage import whole_model


class EncoderBuilder(LayerNormBuilder):
    """Builds BERT.

    names             names of the parts, without the module around them.
    position_table    table of learned positions, or "".
    segment_table     table of segments, or "".
    embedding_norm    norm of the sum of embeddings.
    extra_positions   rows of ``position_table`` before the first position, that of RoBERTa's padding among them.
    """

    names: ClassVar[Names] = Names(
        embedding="embeddings.word_embeddings",
        layers="encoder.layer",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        output="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        gate_up=("intermediate.dense",),
        down="output.dense",
        mlp_norm="output.LayerNorm",
    )
    position_table: ClassVar[str] = "embeddings.position_embeddings"
    segment_table: ClassVar[str] = "embeddings.token_type_embeddings"
    embedding_norm: ClassVar[str] = "embeddings.LayerNorm"
    qkv_bias = output_bias = mlp_bias = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        words = f"{self.names.embedding}.weight"
        self.outer = next((outer for outer in ("", *OUTER) if weights.has(outer + words)), "")
        self.extra_positions = 0
        self._num_keys: dict[int, int] = {}

    def build(self) -> Decoder:
        """Build the model; all of it."""
        config = self.config
        if self.weights.stage not in (None, whole_model(config.num_layers)):
            raise error("unsupported", what="An encoder in pipeline stages", hint="Leave -pp out.")
        return EncoderModel(
            config=config,
            ops=self.ops,
            stage=whole_model(config.num_layers),
            embedding=None,
            blocks=[self.block(layer) for layer in range(config.num_layers)],
            norm=self.final_norm(),
            head=None,
            output_width=config.hidden_size,
            inputs=self.inputs(),
            pooled_head=self.output_head(),
            num_keys=self._num_keys,
        )

    def inputs(self) -> EncoderEmbedding:
        """Return the input of the first layer."""
        config, D = self.config, self.config.hidden_size
        words, _ = self.weights.embedding(
            f"{self._name(self.names.embedding)}.weight", config.vocab_size, D, tied=False
        )
        positions = segments = None
        if self.position_table:
            rows = config.max_position + self.extra_positions
            positions, _ = self.weights.embedding(f"{self._name(self.position_table)}.weight", rows, D, tied=False)
        kinds = int(config.raw.get("type_vocab_size") or 0)
        if self.segment_table and kinds:
            segments = self.weights.tensor(f"{self._name(self.segment_table)}.weight", kinds, D)
        pad = int(config.raw.get("pad_token_id") or 0)
        norm = self.norm(self._name(self.embedding_norm))
        return EncoderEmbedding(words, norm, positions, segments, self.extra_positions, pad)

    def _name(self, name: str) -> str:
        return self.outer + name

    def layer_name(self, layer: int, name: str) -> str:
        """Return the full name of a part of a layer."""
        return self.outer + super().layer_name(layer, name)

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Return a layer norm; old files call its weight gamma and its bias beta."""
        if not self.weights.has(f"{name}.gamma"):
            return self.layer_norm(name, width)
        D = width or self.config.hidden_size
        weight, bias = (self.weights.tensor(f"{name}.{part}", D) for part in ("gamma", "beta"))
        return self.ops.layer_norm(weight, bias, self.config.norm_eps)

    def final_norm(self) -> Norm | None:
        """Return None: every layer ends with a norm."""
        return None

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer, with norms after the residual sums."""
        attention_norm, mlp_norm = (
            self.norm(self.layer_name(layer, name)) for name in (self.names.attention_norm, self.names.mlp_norm)
        )
        return Block(attention_norm, self.attention(layer), mlp_norm, self.mlp(layer), norm_first=False)

    def attention(self, layer: int) -> EncoderAttention:
        """Return the attention of a layer."""
        config = self.config
        width = config.num_heads * config.head_dim
        output = self.weights.linear(
            self.layer_name(layer, self.names.output), config.hidden_size, width, bias=self.output_bias
        )
        window, bias = config.sliding_windows[layer], self.position_bias()
        rotary = self.rotary(layer) if not self.position_table else None
        attention = EncoderAttention(self.qkv(layer), output, config.num_heads, config.head_dim, rotary, window, bias)
        attention.num_keys = self._num_keys
        return attention

    def position_bias(self) -> PositionBias | None:
        """Return the bias of the scores of attention."""
        return None

    # --- scores ---

    def output_head(self) -> PooledHead | None:
        """Return what follows the hidden states: layers to scores, the projection of each token, or nothing."""
        head = self.config.head
        if head is not None and head.num_labels:
            return self.pooled_head(head.num_labels)
        if head is not None and head.projection:
            return self.head_layer("linear", head.projection, self.config.hidden_size, bias=False)
        return None

    def pooled_head(self, labels: int) -> ScoreHead:
        """Return the layers from the pooled hidden state to scores: BERT's pooler and a linear layer."""
        D = self.config.hidden_size
        pooler = self.head_layer(self._name("pooler.dense"), D, D, torch.tanh)
        return ScoreHead([pooler, self.head_layer("classifier", labels, D)])

    def head_layer(
        self, name: str, n: int, k: int, function: Callable[[Tensor], Tensor] | None = None, bias: bool = True
    ) -> HeadLayer:
        """Return a linear layer of the head, [R, K] -> [R, N]."""
        weight = self.weights.tensor(f"{name}.weight", n, k, dtype=torch.float32)
        return HeadLayer(
            weight, self.weights.tensor(f"{name}.bias", n, dtype=torch.float32) if bias else None, function
        )


def host_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation, [R, N] -> [R, N], for the name used in config.json. Raises ``unsupported``."""
    return F.tanh if name == "tanh" else FUNCTIONS[function_name(name)]
