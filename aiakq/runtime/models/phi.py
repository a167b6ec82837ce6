"""Phi-1, 1.5 and 2: parallel blocks with one layer norm, an MLP without a gate, biases everywhere."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import LayerNormBuilder, Names, unsupported
from aiakq.runtime.models.decoder import Decoder, DecoderLayer, ParallelBlock, Weights


class PhiBuilder(LayerNormBuilder):
    """Phi, with rotary embedding of half of each head unless the config says otherwise."""

    rotates_parts = True
    rotates_odd_parts = False
    names = Names(norm="model.final_layernorm", output="self_attn.dense", gate_up=("mlp.fc1",), down="mlp.fc2")
    qkv_bias = output_bias = mlp_bias = head_bias = True

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer. Raises ``unsupported`` for per-head layer norms, which no published model has."""
        if self.config.raw.get("qk_layernorm"):
            reason = "its queries and keys have layer norms"
            raise unsupported(self.config, reason)
        norm = self.norm(self.layer_name(layer, self.names.attention_norm))
        return ParallelBlock(norm, self.attention(layer), self.mlp(layer), self.ops.scaling())


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """PhiForCausalLM from ``weights``."""
    return PhiBuilder(config, weights).build()
