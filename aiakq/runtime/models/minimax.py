"""MiniMax-01: lightning attention in most layers, softmax attention in the others, and Mixtral's experts (MiniMax 2025,
arXiv:2501.08313).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.recurrent_types import RecurrenceSpec
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.recurrent import LightningAttention
from aiakq.runtime.models.builder import rotated_part, rows_by_part, unsupported
from aiakq.runtime.models.decoder import Decoder, Mixer, NormedResidualBlock, Weights
from aiakq.runtime.models.mixtral import MixtralBuilder

#: Epsilon of the norm of lightning attention, which config.json does not set.
_INNER_EPS = 1e-6


class MiniMaxBuilder(MixtralBuilder):
    """Mixtral with lightning attention, and residuals taken behind the norms."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.rotates_parts = config.raw.get("rotary_dim") is not None

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return the tables for the first ``rotary_dim`` elements of each head. Raises ``unsupported``."""
        return super().rotary_tables(with_rotary_dim(self.config, rope))

    def block(self, layer: int) -> NormedResidualBlock:
        """Return a layer."""
        kind = "linear_attn" if self.is_linear(layer) else "full_attn"
        return NormedResidualBlock(
            self.norm(self.layer_name(layer, self.names.attention_norm)),
            self.attention(layer),
            self.norm(self.layer_name(layer, self.names.mlp_norm)),
            self.mlp(layer),
            self.factors(kind),
            self.factors("mlp"),
        )

    def factors(self, part: str) -> tuple[Scaling, Scaling]:
        """Return the factors of the residual and of the output of a part of a layer."""
        alpha, beta = (float(self.config.raw[f"{part}_{name}_factor"]) for name in ("alpha", "beta"))
        return self.ops.scaling(alpha), self.ops.scaling(beta)

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has lightning attention."""
        return self.config.layer_kinds[layer] == "linear_attention"

    def attention(self, layer: int) -> Mixer:
        """Return attention or lightning attention, depending on the layer."""
        return self.lightning_attention(layer) if self.is_linear(layer) else super().attention(layer)

    def lightning_attention(self, layer: int) -> LightningAttention:
        """Return the lightning attention of a layer with its projections. Raises ``unsupported``."""
        config, weights, prefix = self.config, self.weights, self.layer_name(layer, "self_attn")
        D, H, head = config.hidden_size, config.num_heads, config.head_dim
        if config.activation not in ("silu", "swish"):
            raise unsupported(config, f"its activation function is {config.activation:.64}")
        # Stored by head, each with its query, key and value.
        rows = rows_by_part(H, head, head, head).view(3, -1).flip(0).flatten()
        rates = decay_rates(H, layer, config.num_layers)
        spec = RecurrenceSpec(
            "state_space",
            num_heads=H,
            num_key_heads=H,
            key_dim=head,
            value_dim=head,
            a_log=rates.log().float().to(self.ops.device),
            step_bias=torch.zeros(H, device=self.ops.device),
            step_limits=(1.0, 1.0),
        )
        weight = weights.tensor(f"{prefix}.norm.weight", H * head)
        return LightningAttention(
            weights.linear(f"{prefix}.qkv_proj", 3 * H * head, D, rows=rows),
            weights.linear(f"{prefix}.output_gate", H * head, D),
            spec,
            self.ops.gated_norm(weight, H * head, _INNER_EPS, gate_first=False, sigmoid=True),
            weights.linear(f"{prefix}.out_proj", D, H * head),
            self.ops,
        )


def with_rotary_dim(config: ModelConfig, rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``rope`` with the part of each head that ``rotary_dim`` of MiniMax's files states.

    Raises ``unsupported`` as ``rotated_part``, and if ``rope`` states another part.
    """
    width, stated = config.raw.get("rotary_dim"), rope.get("partial_rotary_factor")
    if width is None:
        return rope
    part = rotated_part(config, width)
    if stated not in (None, part, width / config.head_dim):
        reason = (
            f"its rotary_dim is {width!r:.64}, its partial_rotary_factor {stated!r:.64}, and head_dim {config.head_dim}"
        )
        raise unsupported(config, reason)
    return {**rope, "partial_rotary_factor": part}


def decay_rates(heads: int, layer: int, layers: int) -> Tensor:
    """Return the rates [H] float64 at which states of lightning attention decay per token.

    They are ALiBi's slopes, and less in later layers (equation 10 of arXiv:2401.04658 has those of the first layer).
    """
    slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
    return slopes * (1 - layer / (layers - 1 + 1e-5) + 1e-5)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """MiniMaxForCausalLM from ``weights``. Raises ``unsupported``."""
    listed = config.raw.get("attn_type_list")
    if listed and [kind == 0 for kind in listed] != [kind == "linear_attention" for kind in config.layer_kinds]:
        reason = "attn_type_list has other layers of lightning attention than layer_types"
        raise unsupported(config, reason)
    return MiniMaxBuilder(config, weights).build()
