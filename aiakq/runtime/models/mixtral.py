"""Mixtral: Mistral with a mixture of experts in every layer (Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from aiakq.kernels.ops.routing import Routing, SoftmaxRouting
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.mixture import Mixture, size


def block_sparse_moe(builder: DecoderBuilder, layer: int, routing: Routing) -> SparseMLP:
    """Return the experts of a layer, with Mixtral's tensor names."""
    mixture = Mixture(
        prefix=builder.layer_name(layer, "block_sparse_moe"),
        inside=builder.layer_name(layer, "mlp"),
        names=("w1", "w3", "w2"),
        count=size(builder.config.raw, "num_local_experts"),
        width=builder.config.intermediate_size,
        routing=routing,
    )
    return mixture.build(builder.config, builder.weights)


class MixtralBuilder(DecoderBuilder):
    """Mistral with experts."""

    def mlp(self, layer: int) -> SparseMLP:
        """Return the experts of a layer."""
        top_k = size(self.config.raw, "num_experts_per_tok")
        return block_sparse_moe(self, layer, SoftmaxRouting(top_k, normalize=True))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """MixtralForCausalLM from ``weights``."""
    return MixtralBuilder(config, weights).build()
