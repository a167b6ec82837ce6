"""Qwen3.5 and 3.6: Qwen3-Next's layers with projections of their own for every part, with or without experts."""

from __future__ import annotations

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import REPLICATED
from aiakq.kernels.recurrent_types import RecurrenceSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import MLP, Decoder, Weights
from aiakq.runtime.models.qwen3_next import Qwen3NextBuilder


class Qwen35MoeBuilder(Qwen3NextBuilder):
    """The models with experts in every layer, whose weights are normalized."""

    normalizes = True

    def recurrence_inputs(self, prefix: str, spec: RecurrenceSpec) -> tuple[LinearLayer, LinearLayer]:
        """Return the projections to queries, keys, values and output gates, and to the two gates of a head."""
        heads, values = spec.num_heads, spec.num_heads * spec.value_dim
        mixed = [(f"{prefix}.in_proj_qkv", spec.width), (f"{prefix}.in_proj_z", values)]
        gates = [(f"{prefix}.in_proj_b", heads), (f"{prefix}.in_proj_a", heads)]
        return (
            self.weights.stacked(mixed, self.config.hidden_size),
            self.weights.stacked(gates, self.config.hidden_size, role=REPLICATED),
        )


class Qwen35Builder(Qwen35MoeBuilder):
    """The dense models."""

    def mlp(self, layer: int) -> MLP:
        """Return the MLP of a layer."""
        return DecoderBuilder.mlp(self, layer)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM from ``weights``."""
    family = Qwen35MoeBuilder if config.architecture == "Qwen3_5MoeForCausalLM" else Qwen35Builder
    return family(config, weights).build()
