"""Qwen3-MoE: Qwen3 with many small experts, none of them shared."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.decoder import Decoder, GatedMLP, Weights
from aiakq.runtime.models.llama import build_llama_like
from aiakq.runtime.models.qwen2_moe import gated, is_sparse, mixture


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen3MoeForCausalLM from ``weights``."""

    def mlp(layer: int) -> GatedMLP | SparseMLP:
        if not is_sparse(config, layer):
            return gated(config, weights, f"model.layers.{layer}.mlp", config.intermediate_size)
        return mixture(config, layer).build(config, weights)

    bias = bool(config.raw.get("attention_bias", False))
    return build_llama_like(config, weights, qkv_bias=bias, output_bias=bias, head_norms=True, mlp=mlp)
