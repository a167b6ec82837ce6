"""GLM-4.5 and 4.6: Llama with biases of queries, keys and values, and experts chosen by sigmoids within groups."""

from __future__ import annotations

from torch import Tensor

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.experts import SigmoidRouting
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import MLP, Decoder, Weights
from aiakq.runtime.models.mixture import Mixture, size
from aiakq.runtime.models.qwen2_moe import gated


class Glm4MoeBuilder(DecoderBuilder):
    """Dense layers first, then experts and a shared one; part of each head is rotated."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = bool(config.raw.get("attention_bias", False))

    def head_norms(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Weights [D] of the norms of every head, where ``use_qk_norm`` says so."""
        if not self.config.raw.get("use_qk_norm", False):
            return None, None
        q_norm, k_norm = (
            self.weights.tensor(f"{self.at(layer, name)}.weight", self.config.head_dim)
            for name in (self.names.q_norm, self.names.k_norm)
        )
        return q_norm, k_norm

    def mlp(self, layer: int) -> MLP:
        """Experts and a shared one from ``first_k_dense_replace`` on."""
        config, raw, at = self.config, self.config.raw, self.at(layer, "mlp")
        if layer < raw.get("first_k_dense_replace", 1):
            return super().mlp(layer)
        count, width = size(raw, "n_routed_experts", "num_local_experts"), size(raw, "moe_intermediate_size")
        routing = SigmoidRouting(
            top_k=size(raw, "num_experts_per_tok"),
            normalize=bool(raw.get("norm_topk_prob", True)),
            scale=float(raw.get("routed_scaling_factor", 1.0)),
            sigmoid=self.ops.activation("sigmoid"),
            correction=self.weights.tensor(f"{at}.gate.e_score_correction_bias", count).float(),
            groups=(raw.get("n_group") or 1, raw.get("topk_group") or 1),
        )
        names = ("gate_proj", "up_proj", "down_proj")
        sparse = Mixture(at, at, names, count, width, routing).build(config, self.weights)
        sparse.shared = gated(config, self.weights, f"{at}.shared_experts", width * (raw.get("n_shared_experts") or 1))
        return sparse


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Glm4MoeForCausalLM from ``weights``."""
    return Glm4MoeBuilder(config, weights).build()
