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
from aiakq.runtime.models.builder import rows_by_part, unsupported
from aiakq.runtime.models.decoder import Decoder, Mixer, NormedResidualBlock, Weights
from aiakq.runtime.models.mixtral import MixtralBuilder


class MiniMaxBuilder(MixtralBuilder):
    """Mixtral with lightning attention, and residuals taken behind the norms."""

    rotates_parts = True

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return the tables for the first ``rotary_dim`` elements of each head."""
        width = self.config.raw.get("rotary_dim")
        part = {} if width is None else {"partial_rotary_factor": width / self.config.head_dim}
        return super().rotary_tables({**part, **rope})

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
            self.ops.gated_norm(weight, H * head, config.norm_eps, gate_first=False, sigmoid=True),
            weights.linear(f"{prefix}.out_proj", D, H * head),
            self.ops,
        )


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
