"""Phi-3.5-MoE: layer norms, attention with biases, and two experts selected one after the other (arXiv:2409.12136)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.builder import LayerNormBuilder, unsupported
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.mixtral import block_sparse_moe
from aiakq.runtime.models.mixture import size


@dataclass(frozen=True)
class SparseMixerRouting:
    """The best expert, then the best of the others, each weighted by a softmax over the scores close to its own.

    jitter  scores are excluded if their relative distance from the best one exceeds twice this value.
    """

    jitter: float
    top_k: int = 2

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        left, shares, chosen = scores, [], []
        for _ in range(self.top_k):
            best, number = left.max(dim=-1, keepdim=True)
            far = (best - scores) / scores.abs().clamp(min=best) > 2 * self.jitter
            shares.append(torch.softmax(left.masked_fill(far, float("-inf")), dim=-1).gather(-1, number))
            chosen.append(number)
            left = left.scatter(-1, number, float("-inf"))
        return torch.cat(shares, dim=-1), torch.cat(chosen, dim=-1)


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
