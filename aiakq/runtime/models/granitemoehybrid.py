"""Granite 4: GraniteMoE with a shared expert, or with that expert only, and Mamba 2 instead of attention in most
layers.
"""

from __future__ import annotations

from aiakq.kernels.ops.parallel import ROW, Column
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.config.rope import is_rotary
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.decoder import MLP, Decoder, GatedMLP, Mixer, Weights
from aiakq.runtime.models.granitemoe import GraniteMoeBuilder
from aiakq.runtime.models.mamba2 import StateSpace, hybrid_width
from aiakq.runtime.models.mixture import size


class GraniteMoeHybridBuilder(GraniteMoeBuilder):
    """GraniteMoE with Mamba 2 layers."""

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None unless the config requests rotary embedding."""
        return super().rotary(layer) if is_rotary(self.config.raw) else None

    def attention(self, layer: int) -> Mixer:
        """Return attention or Mamba 2, depending on the layer."""
        if self.config.layer_kinds[layer] != "linear_attention":
            return super().attention(layer)
        raw = self.config.raw
        sizes = StateSpace.of_hybrid(raw)
        return sizes.build(self.config, self.weights, self.layer_name(layer, "mamba"), hybrid_width(raw))

    def mlp(self, layer: int) -> MLP:
        """Return the routed experts with the shared expert, or the shared expert alone if no others are configured."""
        shared = self.shared_mlp(layer)
        if not self.config.raw.get("num_local_experts", 8):
            return shared
        sparse = super().mlp(layer)
        assert isinstance(sparse, SparseMLP)
        sparse.shared = shared
        return sparse

    def shared_mlp(self, layer: int) -> GatedMLP:
        """Return the shared expert."""
        D, F = self.config.hidden_size, size(self.config.raw, "shared_intermediate_size")
        first, second = (self.layer_name(layer, f"shared_mlp.{name}_linear") for name in ("input", "output"))
        down = self.weights.linear(second, D, F, role=ROW)
        gate_up = self.weights.linear(first, 2 * F, D, role=Column(down, "gu"))
        return GatedMLP(gate_up, down, activation(self.config.activation, self.ops))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GraniteMoeHybridForCausalLM from ``weights``."""
    return GraniteMoeHybridBuilder(config, weights).build()
