"""GLM-4.5 to 4.7, and Solar Open: Llama with biases in the QKV projection, and experts with grouped sigmoid routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.shared_experts import SharedExpertsBuilder


class Glm4MoeBuilder(SharedExpertsBuilder):
    """GLM-4.5: dense layers, then layers with routed and shared experts; rotary embedding of a part of each head."""

    rotates_parts = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = bool(config.raw.get("attention_bias", False))
        self.has_head_norms = bool(config.raw.get("use_qk_norm", False))


class SolarOpenBuilder(Glm4MoeBuilder):
    """Solar Open: experts in every layer, whole heads rotated."""

    rotates_parts = False
    defaults: ClassVar[Mapping[str, Any]] = {"first_k_dense_replace": 0}


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Glm4MoeForCausalLM or SolarOpenForCausalLM from ``weights``."""
    is_solar = config.architecture == "SolarOpenForCausalLM"
    return (SolarOpenBuilder if is_solar else Glm4MoeBuilder)(config, weights).build()
