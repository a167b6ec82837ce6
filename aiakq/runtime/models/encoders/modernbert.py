"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): rotary embedding, mostly windows, gated MLPs, norms first."""

from __future__ import annotations

from dataclasses import replace

import torch

from aiakq.kernels.ops.norm import Norm
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import Names
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, Weights
from aiakq.runtime.models.encoders.builder import EncoderBuilder, host_function
from aiakq.runtime.models.encoders.encoder import Identity, ScoreHead


class ModernBertBuilder(EncoderBuilder):
    """ModernBERT."""

    names = Names(
        embedding="embeddings.tok_embeddings",
        layers="layers",
        norm="final_norm",
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        attention_norm="attn_norm",
        gate_up=("mlp.Wi",),
        down="mlp.Wo",
        mlp_norm="mlp_norm",
    )
    position_table = segment_table = ""
    embedding_norm = "embeddings.norm"
    gated = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw["attention_bias"])
        self.mlp_bias = bool(config.raw["mlp_bias"])

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Return a layer norm, by default without a bias."""
        D = width or self.config.hidden_size
        bias = self.weights.tensor(f"{name}.bias", D) if self.config.raw["norm_bias"] else None
        return self.ops.layer_norm(self.weights.tensor(f"{name}.weight", D), bias, self.config.norm_eps)

    def final_norm(self) -> Norm:
        """Return the norm behind the last layer."""
        return self.norm(self._name(self.names.norm))

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer; the first has no norm before attention, because the embeddings have one."""
        mlp_norm = self.norm(self.layer_name(layer, self.names.mlp_norm))
        attention_norm = self.norm(self.layer_name(layer, self.names.attention_norm)) if layer else Identity()
        return Block(attention_norm, self.attention(layer), mlp_norm, self.mlp(layer))

    def pooled_head(self, labels: int) -> ScoreHead:
        """Return the head over the pooled hidden states."""
        config, D = self.config, self.config.hidden_size
        function = host_function(str(config.raw["classifier_activation"]))
        first = self.head_layer("head.dense", D, D, function, bias=bool(config.raw["classifier_bias"]))
        weight = self.weights.tensor("head.norm.weight", D, dtype=torch.float32)
        bias = self.weights.tensor("head.norm.bias", D, dtype=torch.float32) if config.raw["norm_bias"] else None
        first = replace(first, norm=(weight, bias, config.norm_eps))
        return ScoreHead([first, self.head_layer("classifier", labels, D)])


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """See FamilyModule."""
    return ModernBertBuilder(config, weights).build()
