"""Phi-1, 1.5 and 2: attention and a plain MLP side by side after one layer norm, biases everywhere."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import LayerNormBuilder, Names, unsupported
from aiakq.runtime.models.decoder import Decoder, DecoderLayer, ParallelBlock, Weights


class PhiBuilder(LayerNormBuilder):
    """Phi: half of each head is rotated unless the config says otherwise."""

    names = Names(norm="model.final_layernorm", output="self_attn.dense", gate_up=("mlp.fc1",), down="mlp.fc2")
    qkv_bias = output_bias = mlp_bias = head_bias = True

    def block(self, layer: int) -> DecoderLayer:
        """One layer. Raises ``unsupported`` for layer norms of heads, which no published model has."""
        if self.config.raw.get("qk_layernorm"):
            reason = "its queries and keys have layer norms"
            raise unsupported(self.config, reason)
        norm = self.norm(self.at(layer, self.names.attention_norm))
        return ParallelBlock(norm, self.attention(layer), self.mlp(layer), self.ops.scaling())


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """PhiForCausalLM from ``weights``."""
    return PhiBuilder(config, weights).build()
