"""Mixtral: Mistral with a mixture of experts in every layer (Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.experts import SoftmaxRouting, SparseMLP
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.llama import WholeHeadsBuilder
from aiakq.runtime.models.mixture import Mixture, size


class MixtralBuilder(WholeHeadsBuilder):
    """Mistral with experts."""

    def mlp(self, layer: int) -> SparseMLP:
        """The experts of a layer."""
        raw = self.config.raw
        mixture = Mixture(
            at=self.at(layer, "block_sparse_moe"),
            inside=self.at(layer, "mlp"),
            names=("w1", "w3", "w2"),
            count=size(raw, "num_local_experts"),
            width=self.config.intermediate_size,
            routing=SoftmaxRouting(size(raw, "num_experts_per_tok"), normalize=True),
        )
        return mixture.build(self.config, self.weights)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """MixtralForCausalLM from ``weights``."""
    return MixtralBuilder(config, weights).build()
