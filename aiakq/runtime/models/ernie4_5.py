"""ERNIE 4.5 (text): Llama with interleaved rotary embedding; the mixtures have shared experts besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from aiakq.kernels.ops.routing import SoftmaxRouting
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import MLP, Decoder, Weights
from aiakq.runtime.models.mixture import Mixture, size
from aiakq.runtime.models.qwen2_moe import gated


class ErnieBuilder(DecoderBuilder):
    """The dense models."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = self.mlp_bias = bool(config.raw["use_bias"])

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return interleaved tables: adjacent elements are rotated together."""
        return replace(super().rotary_tables(rope), interleaved=True)


class ErnieMoeBuilder(ErnieBuilder):
    """The mixtures: routed and shared experts in the layers that the config selects."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.head_bias = bool(config.raw["use_bias"])

    def mlp(self, layer: int) -> MLP:
        """Return routed and shared experts, or a dense MLP."""
        config, raw, prefix = self.config, self.config.raw, self.layer_name(layer, "mlp")
        last = raw["moe_layer_end_index"]
        selected = raw["moe_layer_start_index"] <= layer and (last == -1 or layer <= last)
        if not selected or (layer + 1) % size(raw, "moe_layer_interval"):
            return super().mlp(layer)
        count, width = size(raw, "moe_num_experts"), size(raw, "moe_intermediate_size")
        correction = self.weights.tensor(f"{prefix}.moe_statics.e_score_correction_bias", 1, count, dtype=torch.float32)
        routing = SoftmaxRouting(
            size(raw, "moe_k"), normalize=True, correction=correction[0], smallest_sum=float(raw["moe_norm_min"])
        )
        names = ("gate_proj", "up_proj", "down_proj")
        sparse = Mixture(prefix, prefix, names, count, width, routing).build(config, self.weights)
        shared = int(raw["moe_num_shared_experts"])
        if shared:
            sparse.shared = gated(config, self.weights, f"{prefix}.shared_experts", shared * width, bias=self.mlp_bias)
        return sparse


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Ernie4_5ForCausalLM or Ernie4_5_MoeForCausalLM from ``weights``."""
    dense = config.architecture == "Ernie4_5ForCausalLM"
    return (ErnieBuilder if dense else ErnieMoeBuilder)(config, weights).build()
