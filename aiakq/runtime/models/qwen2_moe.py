"""Qwen2-MoE: Qwen2 with many small experts and a shared expert, except in the layers that the config excludes."""

from __future__ import annotations

from aiakq.kernels.ops.parallel import REPLICATED, ROW, Column
from aiakq.kernels.ops.routing import SoftmaxRouting
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import MLP, Decoder, GatedMLP, Weights
from aiakq.runtime.models.mixture import Mixture, size


class Qwen2MoeBuilder(DecoderBuilder):
    """Qwen2 with experts.

    normalizes  whether the weights of a token's experts are normalized in models whose config does not say so.
    """

    normalizes = False

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = bool(config.raw.get("qkv_bias", True))

    def mlp(self, layer: int) -> MLP:
        """Return routed and shared experts, or a dense MLP."""
        if not is_sparse(self.config, layer):
            return super().mlp(layer)
        prefix, config = self.layer_name(layer, "mlp"), self.config
        sparse = mixture(config, layer, self.normalizes).build(config, self.weights)
        width = size(config.raw, "shared_expert_intermediate_size")
        sparse.shared = gated(config, self.weights, f"{prefix}.shared_expert", width)
        gate = f"{prefix}.shared_expert_gate"
        sparse.shared_gate = self.weights.linear(gate, 1, config.hidden_size, role=REPLICATED)
        return sparse


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen2MoeForCausalLM from ``weights``."""
    return Qwen2MoeBuilder(config, weights).build()


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts: every ``decoder_sparse_step``-th layer, except ``mlp_only_layers``."""
    step = config.raw.get("decoder_sparse_step") or 1
    return layer not in (config.raw.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def mixture(config: ModelConfig, layer: int, normalizes: bool = False) -> Mixture:
    """Return the experts of a layer of Qwen2-MoE or Qwen3-MoE."""
    raw = config.raw
    return Mixture(
        prefix=f"model.layers.{layer}.mlp",
        inside=f"model.layers.{layer}.mlp",
        names=("gate_proj", "up_proj", "down_proj"),
        count=size(raw, "num_experts", "num_local_experts"),
        width=size(raw, "moe_intermediate_size"),
        routing=SoftmaxRouting(size(raw, "num_experts_per_tok"), bool(raw.get("norm_topk_prob", normalizes))),
    )


def gated(
    config: ModelConfig, weights: Weights, prefix: str, width: int, bias: bool = False, gate: str = "gate_proj"
) -> GatedMLP:
    """Return the gated MLP at ``prefix`` with intermediate size ``width``; ``gate`` names its gate projection."""
    D, parts = config.hidden_size, [(f"{prefix}.{gate}", width), (f"{prefix}.up_proj", width)]
    down = weights.linear(f"{prefix}.down_proj", D, width, bias=bias, role=ROW)
    gate_up = weights.stacked(parts, D, bias=bias, role=Column(down, "gu"))
    return GatedMLP(gate_up, down, activation(config.activation, weights.ops))
