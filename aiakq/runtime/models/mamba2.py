"""Mamba 2: state spaces instead of attention, and no MLPs (Dao and Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aiakq.errors import error
from aiakq.kernels.recurrent_types import ConvolutionSpec, RecurrenceSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.recurrent import GatedRecurrence
from aiakq.runtime.models.builder import DecoderBuilder, Names, unsupported
from aiakq.runtime.models.decoder import Decoder, MixerBlock, Weights
from aiakq.runtime.models.mixture import size


class Mamba2Builder(DecoderBuilder):
    """One norm and one recurrent layer per block."""

    names = Names(
        embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f", attention_norm="norm"
    )

    def block(self, layer: int) -> MixerBlock:
        """One layer."""
        return MixerBlock(self.norm(self.at(layer, self.names.attention_norm)), self.attention(layer))

    def attention(self, layer: int) -> GatedRecurrence:
        """The state space of a layer with its projections."""
        config, weights, at = self.config, self.weights, self.at(layer, "mixer")
        raw, D, H = config.raw, config.hidden_size, size(config.raw, "num_heads")
        groups, bias = size(raw, "n_groups"), bool(raw.get("use_bias", False))
        width, channels = H * size(raw, "head_dim"), H * size(raw, "head_dim") + 2 * groups * size(raw, "state_size")
        if width != int(D * (raw.get("expand") or 2)) or H % groups:
            reason = f"{H} heads of {width // H} in {groups} groups do not make {raw.get('expand')} times {D}"
            raise error("model_malformed", file="config.json", reason=reason)
        # Stored as gate, values with keys and queries, steps.
        rows = torch.arange(width + channels + H)
        rows = torch.cat([rows[width : width + channels], rows[:width], rows[width + channels :]])
        return GatedRecurrence(
            weights.linear(f"{at}.in_proj", len(rows), D, bias=bias, rows=rows),
            None,
            self.convolution(at, channels),
            RecurrenceSpec(
                "state_space",
                num_heads=H,
                num_key_heads=groups,
                key_dim=size(raw, "state_size"),
                value_dim=width // H,
                a_log=weights.tensor(f"{at}.A_log", H),
                step_bias=weights.tensor(f"{at}.dt_bias", H),
                step_limits=step_limits(raw),
                skip=weights.tensor(f"{at}.D", H),
            ),
            self.ops.gated_norm(
                weights.tensor(f"{at}.norm.weight", width), width // groups, config.norm_eps, gate_first=True
            ),
            weights.linear(f"{at}.out_proj", D, width, bias=bias),
            self.ops,
        )

    def convolution(self, at: str, channels: int) -> ConvolutionSpec:
        """The convolution before the state space, with its activation function."""
        raw, taps = self.config.raw, size(self.config.raw, "conv_kernel")
        if self.config.activation not in ("silu", "swish"):
            raise unsupported(self.config, f"its activation function is {self.config.activation}")
        weight = self.weights.tensor(f"{at}.conv1d.weight", channels, 1, taps).squeeze(1)
        bias = self.weights.tensor(f"{at}.conv1d.bias", channels) if raw.get("use_conv_bias", True) else None
        return ConvolutionSpec(weight, bias, silu=True)


def step_limits(raw: Mapping[str, Any]) -> tuple[float, float]:
    """Between which steps are clamped; transformers does so in prompts, and we do everywhere."""
    low, high = (
        float(limit["__float__"] if isinstance(limit, Mapping) else limit)
        for limit in raw.get("time_step_limit") or (0.0, "inf")
    )
    return low, high


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Mamba2ForCausalLM from ``weights``."""
    return Mamba2Builder(config, weights).build()
