"""LFM2-MoE: LFM2 with routed experts in all but the first layers."""

from __future__ import annotations

import torch

from aiakq.kernels.ops.routing import SigmoidRouting
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import MLP, Decoder, Weights
from aiakq.runtime.models.lfm2 import Lfm2Builder
from aiakq.runtime.models.mixture import Mixture, size

#: What transformers adds to the sum of the weights of a token's experts.
_EPSILON = 1e-6


class Lfm2MoeBuilder(Lfm2Builder):
    """LFM2-MoE."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        DecoderBuilder.__init__(self, config, weights)  # the width of its MLP is as configured

    def mlp(self, layer: int) -> MLP:
        """Return routed experts, or a dense MLP in the first layers."""
        raw = self.config.raw
        if layer < int(raw.get("num_dense_layers", 2)):
            return super().mlp(layer)
        prefix, count = self.layer_name(layer, "feed_forward"), size(raw, "num_experts")
        biased = bool(raw.get("use_expert_bias", True))
        routing = SigmoidRouting(
            top_k=size(raw, "num_experts_per_tok"),
            normalize=bool(raw.get("norm_topk_prob", True)),
            scale=float(raw.get("routed_scaling_factor", 1.0)),
            sigmoid=self.ops.activation("sigmoid"),
            correction=self.weights.tensor(f"{prefix}.expert_bias", count, dtype=torch.float32) if biased else None,
            epsilon=_EPSILON,
        )
        names = ("w1", "w3", "w2")
        width = size(raw, "moe_intermediate_size")
        return Mixture(prefix, prefix, names, count, width, routing).build(self.config, self.weights)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Lfm2MoeForCausalLM from ``weights``."""
    return Lfm2MoeBuilder(config, weights).build()
