"""Jamba: Mamba in most layers, attention without positions in some, and experts in some (Lieber et al. 2024,
arXiv:2403.19887).
"""

from __future__ import annotations

from aiakq.kernels.ops.routing import SoftmaxRouting
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.recurrent import SelectiveStateSpace
from aiakq.runtime.models.bamba import BambaBuilder
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import MLP, Decoder, Mixer, Weights
from aiakq.runtime.models.mamba import SelectiveSizes, step_rank
from aiakq.runtime.models.mamba2 import hybrid_width
from aiakq.runtime.models.mixture import Mixture, size


class JambaBuilder(DecoderBuilder):
    """Llama without positions, with Mamba and experts in some layers."""

    names = BambaBuilder.names

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None: Jamba has no position embeddings."""
        return None

    def attention(self, layer: int) -> Mixer:
        """Return attention or Mamba, depending on the layer."""
        return super().attention(layer) if self.config.layer_kinds[layer] != "linear_attention" else self.mamba(layer)

    def mamba(self, layer: int) -> SelectiveStateSpace:
        """Return the selective scan with its norms."""
        raw, prefix = self.config.raw, self.layer_name(layer, "mamba")
        sizes = SelectiveSizes(
            channels=hybrid_width(raw),
            state=size(raw, "mamba_d_state"),
            rank=step_rank(raw, "mamba_dt_rank"),
            taps=size(raw, "mamba_d_conv"),
            bias=bool(raw["mamba_proj_bias"]),
            convolution_bias=bool(raw["mamba_conv_bias"]),
        )
        scan = sizes.build(self.config, self.weights, prefix)
        steps, keys, queries = (
            self.norm(f"{prefix}.{name}_layernorm", width)
            for name, width in (("dt", sizes.rank), ("b", sizes.state), ("c", sizes.state))
        )
        scan.norms = steps, keys, queries
        return scan

    def mlp(self, layer: int) -> MLP:
        """Return the experts of a layer, or its MLP."""
        raw, prefix = self.config.raw, self.layer_name(layer, "feed_forward")
        count = size(raw, "num_experts")
        if count == 1 or layer % size(raw, "expert_layer_period") != raw["expert_layer_offset"]:
            return super().mlp(layer)
        names = ("gate_proj", "up_proj", "down_proj")
        routing = SoftmaxRouting(size(raw, "num_experts_per_tok"), normalize=False)
        width = self.config.intermediate_size
        return Mixture(prefix, prefix, names, count, width, routing, "router").build(self.config, self.weights)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """JambaForCausalLM from ``weights``."""
    return JambaBuilder(config, weights).build()
