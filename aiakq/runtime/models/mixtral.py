"""Mixtral: Mistral with a mixture of experts in every layer (Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.llama import build_llama_like
from aiakq.runtime.models.mixture import Mixture, size


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """MixtralForCausalLM from ``weights``."""

    def mlp(layer: int) -> SparseMLP:
        mixture = Mixture(
            at=f"model.layers.{layer}.block_sparse_moe",
            inside=f"model.layers.{layer}.mlp",
            names=("w1", "w3", "w2"),
            count=size(config.raw, "num_local_experts"),
            width=config.intermediate_size,
            top_k=size(config.raw, "num_experts_per_tok"),
            normalize=True,
        )
        return mixture.build(config, weights)

    return build_llama_like(config, weights, mlp=mlp)
