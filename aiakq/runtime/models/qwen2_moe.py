"""Qwen2-MoE: Qwen2 with many small experts and a shared one (Qwen team 2024), in all layers but those it names."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.decoder import Decoder, GatedMLP, Weights
from aiakq.runtime.models.llama import build_llama_like
from aiakq.runtime.models.mixture import Mixture, size


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen2MoeForCausalLM from ``weights``."""

    def mlp(layer: int) -> GatedMLP | SparseMLP:
        if not is_sparse(config, layer):
            return gated(config, weights, f"model.layers.{layer}.mlp", config.intermediate_size)
        at = f"model.layers.{layer}.mlp"
        sparse = mixture(config, layer).build(config, weights)
        sparse.shared = gated(
            config, weights, f"{at}.shared_expert", size(config.raw, "shared_expert_intermediate_size")
        )
        sparse.shared_gate = weights.linear(f"{at}.shared_expert_gate", 1, config.hidden_size)
        return sparse

    return build_llama_like(config, weights, qkv_bias=bool(config.raw.get("qkv_bias", True)), mlp=mlp)


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts: every ``decoder_sparse_step``-th one but for ``mlp_only_layers``."""
    step = config.raw.get("decoder_sparse_step") or 1
    return layer not in (config.raw.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def mixture(config: ModelConfig, layer: int) -> Mixture:
    """The experts of a layer of Qwen2-MoE and Qwen3-MoE."""
    return Mixture(
        at=f"model.layers.{layer}.mlp",
        inside=f"model.layers.{layer}.mlp",
        names=("gate_proj", "up_proj", "down_proj"),
        count=size(config.raw, "num_experts", "num_local_experts"),
        width=size(config.raw, "moe_intermediate_size"),
        top_k=size(config.raw, "num_experts_per_tok"),
        normalize=bool(config.raw.get("norm_topk_prob", False)),
    )


def gated(config: ModelConfig, weights: Weights, at: str, width: int) -> GatedMLP:
    """A gated MLP of ``width`` at ``at``."""
    return GatedMLP(
        gate_up=weights.stacked([(f"{at}.gate_proj", width), (f"{at}.up_proj", width)], config.hidden_size),
        down=weights.linear(f"{at}.down_proj", config.hidden_size, width),
        act=activation(config.activation, weights.ops),
    )
