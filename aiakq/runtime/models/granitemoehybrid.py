"""Granite 4: GraniteMoE with a shared expert, or with that alone, and state spaces for attention in most layers."""

from __future__ import annotations

from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.decoder import MLP, Decoder, GatedMLP, Mixer, Weights
from aiakq.runtime.models.granitemoe import GraniteMoeBuilder
from aiakq.runtime.models.mamba2 import StateSpace
from aiakq.runtime.models.mixture import size


class GraniteMoeHybridBuilder(GraniteMoeBuilder):
    """GraniteMoE with state spaces."""

    def rotary(self, layer: int) -> RotaryTables | None:
        """None unless the config asks for positions."""
        return super().rotary(layer) if self.config.raw.get("position_embedding_type") == "rope" else None

    def attention(self, layer: int) -> Mixer:
        """Attention, or a state space."""
        if self.config.layer_kinds[layer] != "linear_attention":
            return super().attention(layer)
        raw = self.config.raw
        sizes = StateSpace.of_hybrid(raw)
        return sizes.build(self.config, self.weights, self.at(layer, "mamba"), size(raw, "mamba_expand"))

    def mlp(self, layer: int) -> MLP:
        """The experts of a layer and the shared one, which stands alone where there are no others."""
        shared = self.shared_mlp(layer)
        if not self.config.raw.get("num_local_experts", 8):
            return shared
        sparse = super().mlp(layer)
        assert isinstance(sparse, SparseMLP)
        sparse.shared = shared
        return sparse

    def shared_mlp(self, layer: int) -> GatedMLP:
        """The shared expert."""
        D, F = self.config.hidden_size, size(self.config.raw, "shared_intermediate_size")
        return GatedMLP(
            self.weights.linear(self.at(layer, "shared_mlp.input_linear"), 2 * F, D),
            self.weights.linear(self.at(layer, "shared_mlp.output_linear"), D, F),
            activation(self.config.activation, self.ops),
        )


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GraniteMoeHybridForCausalLM from ``weights``."""
    return GraniteMoeHybridBuilder(config, weights).build()
