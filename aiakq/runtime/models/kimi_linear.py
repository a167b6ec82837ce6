"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others, and DeepSeek-V3's
experts (Kimi Team 2025, arXiv:2510.26692).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from aiakq.kernels.ops.parallel import REPLICATED
from aiakq.kernels.recurrent_types import ConvolutionSpec, RecurrenceSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.recurrent import KimiDeltaAttention
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import Decoder, Mixer, Weights
from aiakq.runtime.models.deepseek import DeepseekBuilder
from aiakq.runtime.models.mixture import size


class KimiLinearBuilder(DeepseekBuilder):
    """DeepSeek-V3 with Kimi Delta Attention, and without positions."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    experts_name, expert_names = "block_sparse_moe", ("w1", "w3", "w2")

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.raw["n_routed_experts"] = size(self.raw, "num_local_experts")

    def rotary(self, layer: int) -> None:
        """Return None: there are no positions."""

    def attention_scale(self, layer: int) -> float:
        """Scale of heads before absorption."""
        return float(self.sizes.query**-0.5)

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense MLP."""
        kinds = self.raw.get("mlp_layer_types")
        return bool(kinds[layer] == "dense" if kinds else layer < self.raw["first_k_dense_replace"])

    def layer_name(self, layer: int, name: str) -> str:
        """Return the full name of a part of a layer; transformers writes dense MLPs under the name of the experts."""
        full = super().layer_name(layer, name)
        return self.stored_name(full, full.replace(".mlp.", f".{self.experts_name}."))

    def stored_name(self, name: str, other: str) -> str:
        """Return ``other`` if the checkpoint has a linear layer of that name, or else ``name``."""
        is_stored = self.weights.has(f"{other}.weight") or self.weights.is_packed(other)
        return other if is_stored else name

    def attention(self, layer: int) -> Mixer:
        """Return latent attention or the delta rule, depending on the layer."""
        if self.config.layer_kinds[layer] == "linear_attention":
            return self.delta_attention(layer)
        return super().attention(layer)

    def delta_attention(self, layer: int) -> KimiDeltaAttention:
        """Return the delta rule of a layer with its projections. Raises ``unsupported``."""
        config, weights, prefix = self.config, self.weights, self.layer_name(layer, "self_attn")
        H, head = size(self.raw, "linear_num_heads"), size(self.raw, "linear_head_dim")
        D, width = config.hidden_size, H * head
        if config.activation not in ("silu", "swish"):
            raise unsupported(config, f"its activation function is {config.activation:.64}")
        spec = RecurrenceSpec(
            "channel_delta_rule",
            num_heads=H,
            num_key_heads=H,
            key_dim=head,
            value_dim=head,
            a_log=weights.tensor(f"{prefix}.A_log", 1, 1, H, 1, dtype=torch.float32).flatten(),
            step_bias=weights.tensor(f"{prefix}.dt_bias", width, dtype=torch.float32),
        )
        # What transformers' class calls them is what `aiakq quantize` writes.
        steps = [
            self.stored_name(f"{prefix}.{each}", f"{prefix}.forget_gate.{each}") for each in ("f_a_proj", "f_b_proj")
        ]
        names = [*((f"{prefix}.{each}_proj", width) for each in "qkv"), (steps[0], head), (f"{prefix}.g_a_proj", head)]
        weight = weights.tensor(f"{prefix}.o_norm.weight", head).repeat(H)
        return KimiDeltaAttention(
            weights.stacked(names, D),
            weights.linear(f"{prefix}.b_proj", H, D, role=REPLICATED),
            weights.linear(steps[1], width, head),
            weights.linear(f"{prefix}.g_b_proj", width, head),
            ConvolutionSpec(self.taps(prefix, width), silu=True),
            spec,
            self.ops.gated_norm(weight, head, config.norm_eps, gate_first=False, sigmoid=True),
            weights.linear(f"{prefix}.o_proj", D, width),
            self.ops,
        )

    def taps(self, prefix: str, width: int) -> Tensor:
        """Return the taps [channels, K] of the convolutions of queries, keys and values."""
        shape = width, 1, size(self.raw, "linear_conv_kernel_dim")
        return torch.cat([self.weights.tensor(f"{prefix}.{each}_conv1d.weight", *shape) for each in "qkv"]).squeeze(1)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """KimiLinearForCausalLM from ``weights``. Raises ``unsupported``."""
    kinds = config.raw.get("mlp_layer_types")
    if kinds and (len(kinds) != config.num_layers or not {"dense", "sparse"}.issuperset(kinds)):
        reason = "mlp_layer_types is no list of dense and sparse layers"
        raise unsupported(config, reason)
    return KimiLinearBuilder(config, weights).build()
