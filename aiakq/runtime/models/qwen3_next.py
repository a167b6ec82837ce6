"""Qwen3-Next: gated delta rule in three of four layers, gated attention in the others, and Qwen2-MoE's experts."""

from __future__ import annotations

from torch import Tensor

from aiakq.errors import error
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import REPLICATED, Column, Row
from aiakq.kernels.recurrent_types import ConvolutionSpec, RecurrenceSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import GatedAttention
from aiakq.runtime.layers.recurrent import GatedRecurrence
from aiakq.runtime.models.builder import rows_by_part, unsupported
from aiakq.runtime.models.decoder import Decoder, Mixer, Weights
from aiakq.runtime.models.mixture import size
from aiakq.runtime.models.qwen2_moe import Qwen2MoeBuilder


class Qwen3NextBuilder(Qwen2MoeBuilder):
    """Qwen2-MoE with gated delta rule and gated attention."""

    rotates_parts = True
    has_head_norms = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))

    def norm_weight(self, name: str, width: int) -> Tensor:
        """Return one plus the stored weight, [width]."""
        return super().norm_weight(name, width).float() + 1

    def attention(self, layer: int) -> Mixer:
        """Return gated attention or the gated delta rule, depending on the layer."""
        if self.config.layer_kinds[layer] == "linear_attention":
            return self.delta_rule(layer)
        return self.gated_attention(layer)

    def gated_attention(self, layer: int) -> GatedAttention:
        """Return attention with an output gate, whose projection is stored interleaved with the queries by head."""
        config, weights, bias = self.config, self.weights, self.qkv_bias
        D, (queries, keys, values) = config.hidden_size, self.qkv_widths()
        q, k, v = (self.layer_name(layer, name) for name in self.names.qkv)
        rows = rows_by_part(config.num_heads, config.head_dim, config.head_dim).view(2, -1).flip(0).flatten()
        spec, output = self.attention_spec(layer), self.layer_name(layer, self.names.output)
        return GatedAttention(
            weights.linear(q, 2 * queries, D, bias=bias, rows=rows, role=Column(spec, "qq")),
            weights.stacked([(k, keys), (v, values)], D, bias=bias, role=Column(spec, "kv")),
            weights.linear(output, D, queries, bias=self.output_bias, role=Row(spec)),
            spec,
            self.ops,
        )

    def recurrence_inputs(self, prefix: str, spec: RecurrenceSpec) -> tuple[LinearLayer, LinearLayer]:
        """Return the projections to queries, keys, values and output gates, and to the two gates of a head."""
        D, shared = self.config.hidden_size, spec.num_heads // spec.num_key_heads
        values = shared * spec.value_dim
        mixed = rows_by_part(spec.num_key_heads, spec.key_dim, spec.key_dim, values, values)
        gates = rows_by_part(spec.num_key_heads, shared, shared)
        return (
            self.weights.linear(f"{prefix}.in_proj_qkvz", len(mixed), D, rows=mixed),
            self.weights.linear(f"{prefix}.in_proj_ba", len(gates), D, rows=gates, role=REPLICATED),
        )

    def delta_rule(self, layer: int) -> GatedRecurrence:
        """Return the gated delta rule of a layer with its projections."""
        config, weights, prefix = self.config, self.weights, self.layer_name(layer, "linear_attn")
        raw, D = config.raw, config.hidden_size
        heads, key_heads = size(raw, "linear_num_value_heads"), size(raw, "linear_num_key_heads")
        key_dim, value_dim = size(raw, "linear_key_head_dim"), size(raw, "linear_value_head_dim")
        if heads % key_heads:
            reason = f"{heads} value heads cannot share {key_heads} key heads"
            raise error("model_malformed", file="config.json", reason=reason)
        if config.activation not in ("silu", "swish"):
            raise unsupported(config, f"its activation function is {config.activation:.64}")
        spec = RecurrenceSpec(
            "delta_rule",
            num_heads=heads,
            num_key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            a_log=weights.tensor(f"{prefix}.A_log", heads),
            step_bias=weights.tensor(f"{prefix}.dt_bias", heads),
        )
        taps = size(raw, "linear_conv_kernel_dim")
        # A per-head norm with a weight shared by all heads.
        weight = weights.tensor(f"{prefix}.norm.weight", value_dim).repeat(heads)
        return GatedRecurrence(
            *self.recurrence_inputs(prefix, spec),
            ConvolutionSpec(weights.tensor(f"{prefix}.conv1d.weight", spec.width, 1, taps).squeeze(1), silu=True),
            spec,
            self.ops.gated_norm(weight, value_dim, config.norm_eps, gate_first=False),
            weights.linear(f"{prefix}.out_proj", D, heads * value_dim),
            self.ops,
        )


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen3NextForCausalLM from ``weights``."""
    return Qwen3NextBuilder(config, weights).build()
