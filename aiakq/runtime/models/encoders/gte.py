"""GTE multilingual (Zhang et al. 2024, arXiv:2407.19669): BERT with rotary embedding and gated MLPs."""

from __future__ import annotations

import torch

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.models.builder import Names
from aiakq.runtime.models.decoder import Decoder, GatedMLP, Weights
from aiakq.runtime.models.encoders.builder import EncoderBuilder


class GteBuilder(EncoderBuilder):
    """GTE."""

    names = Names(
        embedding="embeddings.word_embeddings",
        layers="encoder.layer",
        qkv=("attention.qkv_proj",),
        output="attention.o_proj",
        attention_norm="attn_ln",
        gate_up=("mlp.up_gate_proj",),
        down="mlp.down_proj",
        mlp_norm="mlp_ln",
    )
    position_table = ""

    def mlp(self, layer: int) -> GatedMLP:
        """Return the gated MLP of a layer; only its second layer may have a bias."""
        D, F = self.config.hidden_size, self.config.intermediate_size
        down = self.weights.linear(self.layer_name(layer, self.names.down), D, F, bias=self.mlp_bias)
        return GatedMLP(self.gate_up(layer, D, F), down, activation(self.config.activation, self.ops))

    def gate_up(self, layer: int, width: int, inner: int) -> LinearLayer:
        """Return the first layer of an MLP, the gate's outputs first; files have them behind the others."""
        name, rows = self.layer_name(layer, self.names.gate_up[0]), torch.arange(2 * inner).roll(inner)
        return self.weights.linear(name, 2 * inner, width, rows=rows)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """See FamilyModule."""
    return GteBuilder(config, weights).build()
