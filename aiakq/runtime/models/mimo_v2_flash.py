"""MiMo-V2-Flash: windows with sinks and twice the key heads in most layers, values of another size than keys, and
DeepSeek-V3's experts without shared ones.
"""

from __future__ import annotations

from dataclasses import replace

from aiakq.kernels.ops.parallel import GATHERED, Column, Row
from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import Attention, ProjectionStep, ValueScale
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.mixture import size
from aiakq.runtime.models.shared_experts import SharedExpertsBuilder


class MiMoV2FlashBuilder(SharedExpertsBuilder):
    """MiMo-V2-Flash."""

    rotates_parts = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias, self.value_dim = bool(config.raw["attention_bias"]), size(config.raw, "v_head_dim")
        scale = config.raw["attention_value_scale"]
        self.value_scale = 1.0 if scale is None else float(scale)

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense MLP. Raises ``model_malformed``."""
        kinds = self.raw.get("mlp_layer_types")
        return (
            layer == 0
            if kinds is None
            else self.listed("mlp_layer_types", kinds, {"dense": True, "sparse": False})[layer]
        )

    def shared_experts(self, name: str, width: int) -> None:
        """Return None: there are none."""
        return None

    def attention(self, layer: int) -> Attention:
        """Return the attention of a layer with its projections."""
        spec, before, D = self.attention_spec(layer), self.before_attention(layer), self.config.hidden_size
        parts = [(self.layer_name(layer, name), width) for name, width in zip(self.names.qkv, spec.widths, strict=True)]
        role = GATHERED if before else Column(spec, "qkv")
        name, inputs = self.layer_name(layer, self.names.output), spec.num_heads * spec.value_dim
        return Attention(
            self.weights.stacked(parts, D, bias=self.qkv_bias, role=role),
            self.weights.linear(name, D, inputs, role=Row(spec)),
            spec,
            self.ops,
            before,
        )

    def before_attention(self, layer: int) -> list[ProjectionStep]:
        """Return the factor of the values."""
        width = self.config.of_layer(layer).num_kv_heads * self.value_dim
        return [] if self.value_scale == 1 else [ValueScale(self.value_scale, width, self.ops)]

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention, with a sink per head in layers with a window."""
        spec = replace(super().attention_spec(layer), value_dim=self.value_dim)
        if spec.sliding_window is None:
            return spec
        names = [self.layer_name(layer, f"self_attn.{name}") for name in ("attention_sink_bias", "sinks")]
        name = next((each for each in names if self.weights.has(each)), names[0])
        return replace(spec, sinks=self.weights.tensor(name, spec.num_heads).float())


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """MiMoV2FlashForCausalLM from ``weights``. Raises ``model_malformed``."""
    return MiMoV2FlashBuilder(config, weights).build()
