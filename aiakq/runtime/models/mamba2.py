"""Mamba 2: state space layers instead of attention, and no MLPs (Dao and Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aiakq.errors import error
from aiakq.formats.config_values import malformed
from aiakq.kernels.ops.gated_norm import GatedNorm
from aiakq.kernels.recurrent_types import ConvolutionSpec, RecurrenceSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.recurrent import GatedRecurrence, SiluGate
from aiakq.runtime.models.builder import DecoderBuilder, Names, rows_by_part, unsupported
from aiakq.runtime.models.decoder import Decoder, Mixer, MixerBlock, Weights
from aiakq.runtime.models.mixture import size


@dataclass(frozen=True)
class StateSpace:
    """Sizes of a family's state space layers; ``head_dim`` is the size of a value head, ``state`` that of a key.

    bias, convolution_bias, output_bias  whether the input projection, the convolution and the output projection have
                                         biases.
    norm                                 whether the gated norm comes after its gate (``gate_first``) or before it
                                         (``gate_last``), or there is only the gate (``none``).
    multipliers                          factors of the projected gate, values, keys, queries and steps.
    step_limits                          range of the steps; None for ``time_step_limit`` of config.json.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    taps: int
    bias: bool
    convolution_bias: bool
    output_bias: bool
    norm: str = "gate_first"
    multipliers: Sequence[float] = (1.0,) * 5
    step_limits: tuple[float, float] | None = None

    @staticmethod
    def of_hybrid(raw: Mapping[str, object]) -> StateSpace:
        """Return the sizes in the config.json of a hybrid family, which also has attention."""
        heads, wide = size(raw, "mamba_n_heads"), hybrid_width(raw)
        bias = bool(raw.get("mamba_proj_bias", False))
        return StateSpace(
            heads=heads,
            head_dim=wide // heads if raw.get("mamba_d_head") in (None, "auto") else size(raw, "mamba_d_head"),
            state=size(raw, "mamba_d_state"),
            groups=size(raw, "mamba_n_groups"),
            taps=size(raw, "mamba_d_conv"),
            bias=bias,
            convolution_bias=bool(raw.get("mamba_conv_bias", True)),
            output_bias=bias,
        )

    def build(self, config: ModelConfig, weights: Weights, prefix: str, total: int) -> GatedRecurrence:
        """Build the layer at ``prefix`` with its projections; ``total`` is the width that config.json states.

        Raises ``model_malformed`` and ``unsupported``.
        """
        D, H, width = config.hidden_size, self.heads, self.heads * self.head_dim
        channels = width + 2 * self.groups * self.state
        if width != total or H % self.groups or width % self.groups:
            reason = f"{H} heads of {self.head_dim} in {self.groups} groups do not make {total}"
            raise error("model_malformed", file="config.json", reason=reason)
        if config.activation not in ("silu", "swish"):
            raise unsupported(config, f"its activation function is {config.activation:.64}")
        # Stored in the order gate, (values, keys, queries), time steps.
        rows = rows_by_part(1, width, channels, H)
        rows = torch.cat([rows[width : width + channels], rows[:width], rows[width + channels :]])
        gate_scale, *scales, step_scale = self.multipliers
        weight = weights.tensor(f"{prefix}.conv1d.weight", channels, 1, self.taps).squeeze(1)
        if any(scale != 1 for scale in scales):  # the convolution is linear in its inputs
            parts = weight.float().split([width, *[self.groups * self.state] * 2])
            weight = torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)])
        bias = weights.tensor(f"{prefix}.conv1d.bias", channels) if self.convolution_bias else None
        return GatedRecurrence(
            weights.linear(f"{prefix}.in_proj", len(rows), D, bias=self.bias, rows=rows),
            None,
            ConvolutionSpec(weight, bias, silu=True),
            RecurrenceSpec(
                "state_space",
                num_heads=H,
                num_key_heads=self.groups,
                key_dim=self.state,
                value_dim=self.head_dim,
                a_log=weights.tensor(f"{prefix}.A_log", H),
                step_bias=weights.tensor(f"{prefix}.dt_bias", H),
                step_limits=self.step_limits or step_limits(config.raw),
                skip=weights.tensor(f"{prefix}.D", H),
            ),
            self._norm(config, weights, f"{prefix}.norm.weight", width),
            weights.linear(f"{prefix}.out_proj", D, width, bias=self.output_bias),
            weights.ops,
            scales=(gate_scale, step_scale),
        )

    def _norm(self, config: ModelConfig, weights: Weights, name: str, width: int) -> GatedNorm:
        """Return the gated norm with the weight ``name`` [width], or only its gate."""
        if self.norm == "none":
            return SiluGate(weights.ops)
        gate_first = self.norm == "gate_first"
        weight = weights.tensor(name, width)
        return weights.ops.gated_norm(weight, width // self.groups, config.norm_eps, gate_first=gate_first)


class Mamba2Builder(DecoderBuilder):
    """Mamba 2: blocks of a norm and a recurrent layer."""

    names = Names(
        embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f", attention_norm="norm"
    )

    def block(self, layer: int) -> MixerBlock:
        """Return a layer."""
        return MixerBlock(self.norm(self.layer_name(layer, self.names.attention_norm)), self.attention(layer))

    def attention(self, layer: int) -> Mixer:
        """Return the state space layer."""
        raw = self.config.raw
        sizes = StateSpace(
            heads=size(raw, "num_heads"),
            head_dim=size(raw, "head_dim"),
            state=size(raw, "state_size"),
            groups=size(raw, "n_groups"),
            taps=size(raw, "conv_kernel"),
            bias=bool(raw.get("use_bias", False)),
            convolution_bias=bool(raw.get("use_conv_bias", True)),
            output_bias=bool(raw.get("use_bias", False)),
        )
        total = size(raw, "expand") * self.config.hidden_size
        return sizes.build(self.config, self.weights, self.layer_name(layer, "mixer"), total)


def hybrid_width(raw: Mapping[str, object]) -> int:
    """Return the width of the state space layers that the config.json of a hybrid family states."""
    return size(raw, "mamba_expand") * size(raw, "hidden_size")


def step_limits(raw: Mapping[str, Any]) -> tuple[float, float]:
    """Return the limits of time steps; transformers clamps them in prompts only, and we clamp them everywhere.

    Raises ``model_malformed``.
    """
    limits = (0.0, math.inf) if raw.get("time_step_limit") is None else raw["time_step_limit"]
    numbers = isinstance(limits, list | tuple) and all(type(limit) in (int, float) for limit in limits)
    if not numbers or len(limits) != 2 or not 0 <= limits[0] <= limits[1]:  # also false for NaN
        raise malformed("time_step_limit", limits, "two ascending numbers")
    return float(limits[0]), float(limits[1])


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Mamba2ForCausalLM from ``weights``."""
    return Mamba2Builder(config, weights).build()
