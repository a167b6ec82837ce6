"""GraniteMoE: Granite with experts, stored in fused tensors, or one by one if quantized."""

from __future__ import annotations

from aiakq.kernels.ops.parallel import REPLICATED
from aiakq.kernels.ops.routing import SoftmaxRouting
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.decoder import MLP, Decoder, Weights
from aiakq.runtime.models.granite import GraniteBuilder
from aiakq.runtime.models.mixture import Mixture, check_routing, fused_experts, size


class GraniteMoeBuilder(GraniteBuilder):
    """Granite with experts; its softmax over the selected experts equals the normalized softmax over all experts."""

    def mlp(self, layer: int) -> MLP:
        """Return the experts of a layer."""
        config, weights, prefix = self.config, self.weights, self.layer_name(layer, "block_sparse_moe")
        D, F = config.hidden_size, config.intermediate_size
        count, top_k = size(config.raw, "num_local_experts"), size(config.raw, "num_experts_per_tok")
        routing = SoftmaxRouting(top_k, normalize=True)
        if not weights.has(f"{prefix}.input_linear.weight"):
            names = ("gate_proj", "up_proj", "down_proj")
            return Mixture(prefix, prefix, names, count, F, routing, router="router.layer").build(config, weights)
        check_routing(top_k, count)
        both = weights.tensor(f"{prefix}.input_linear.weight", count, 2 * F, D)
        down = weights.tensor(f"{prefix}.output_linear.weight", count, D, F)
        act = activation(config.activation, self.ops)
        return SparseMLP(
            router=weights.dense(weights.tensor(f"{prefix}.router.layer.weight", count, D), role=REPLICATED),
            experts=self.ops.experts(fused_experts(weights, both, down), act),
            count=count,
            routing=self.ops.routing(routing, count),
            width=F,
            hidden=D,
        )


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GraniteMoeForCausalLM from ``weights``."""
    return GraniteMoeBuilder(config, weights).build()
