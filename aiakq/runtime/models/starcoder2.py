"""StarCoder2: layer norms, an MLP without a gate, biases, a sliding window (arXiv:2402.19173)."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import LayerNormBuilder, Names
from aiakq.runtime.models.decoder import Decoder, Weights


class Starcoder2Builder(LayerNormBuilder):
    """Llama's attention, with layer norms and an MLP without a gate."""

    names = Names(gate_up=("mlp.c_fc",), down="mlp.c_proj")

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = self.mlp_bias = bool(config.raw.get("use_bias", True))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Starcoder2ForCausalLM from ``weights``."""
    return Starcoder2Builder(config, weights).build()
