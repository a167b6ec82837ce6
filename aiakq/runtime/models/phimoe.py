"""Phi-3.5-MoE: layer norms, attention with biases, and two experts selected one after the other (arXiv:2409.12136)."""

from __future__ import annotations

from aiakq.kernels.ops.routing import SparseMixerRouting
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.builder import LayerNormBuilder, unsupported
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.mixtral import block_sparse_moe
from aiakq.runtime.models.mixture import size


class PhimoeBuilder(LayerNormBuilder):
    """Phi-3.5-MoE."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))
        self.head_bias = bool(config.raw.get("lm_head_bias", False))

    def mlp(self, layer: int) -> SparseMLP:
        """Return the experts of a layer. Raises ``unsupported`` unless a token is routed to two experts."""
        raw = self.config.raw
        top_k = size(raw, "num_experts_per_tok")
        if top_k != 2:
            reason = f"a token is routed to {top_k} experts"
            raise unsupported(self.config, reason)
        routing = SparseMixerRouting(float(raw.get("router_jitter_noise", 0.01)))
        return block_sparse_moe(self, layer, routing)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """PhimoeForCausalLM from ``weights``."""
    return PhimoeBuilder(config, weights).build()
