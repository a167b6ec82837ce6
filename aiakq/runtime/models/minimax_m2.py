"""MiniMax-M2: Mixtral with sigmoid routing, norms over whole projections, and a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aiakq.kernels.ops.routing import SigmoidRouting
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.minimax import with_rotary_dim
from aiakq.runtime.models.mixtral import block_sparse_moe
from aiakq.runtime.models.mixture import size
from aiakq.runtime.models.olmo2 import ProjectionNormBuilder


class MiniMaxM2Builder(ProjectionNormBuilder):
    """Experts in every layer."""

    rotates_parts = True

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return the tables for the first ``rotary_dim`` elements of each head. Raises ``unsupported``."""
        return super().rotary_tables(with_rotary_dim(self.config, rope))

    def mlp(self, layer: int) -> SparseMLP:
        """Return the experts of a layer."""
        raw, count = self.config.raw, size(self.config.raw, "num_local_experts")
        prefix = self.layer_name(layer, "block_sparse_moe")
        routing = SigmoidRouting(
            top_k=size(raw, "num_experts_per_tok"),
            normalize=True,
            scale=1.0,
            sigmoid=self.ops.activation("sigmoid"),
            correction=self.weights.tensor(f"{prefix}.e_score_correction_bias", count, dtype=torch.float32),
        )
        return block_sparse_moe(self, layer, routing)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """MiniMaxM2ForCausalLM from ``weights``. Raises ``unsupported``."""
    if any(kind != 1 for kind in config.raw.get("attn_type_list") or ()):
        reason = "attn_type_list has layers without full attention"
        raise unsupported(config, reason)
    return MiniMaxM2Builder(config, weights).build()
