"""DeepSeek-V2 and V3, GLM-4.7-Flash: multi-head latent attention, dense layers, then layers with grouped and shared
experts (arXiv:2405.04434, arXiv:2412.19437).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.routing import Routing, SoftmaxRouting
from aiakq.kernels.types import AttentionSpec, RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.layers.latent_attention import LatentOutput, LatentProjection, LatentSizes, LowRankQueries
from aiakq.runtime.layers.linear import ConcatLinear
from aiakq.runtime.layers.rotary import yarn_magnitude
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import Decoder, Mixer, Weights
from aiakq.runtime.models.mixture import size
from aiakq.runtime.models.shared_experts import SharedExpertsBuilder

#: Epsilon of the norms inside attention, which config.json does not set.
_INNER_EPS = 1e-6


class DeepseekBuilder(SharedExpertsBuilder):
    """The common parts of V2 and V3."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        raw = self.raw
        self.attention_bias, self.mlp_bias = bool(raw.get("attention_bias")), bool(raw.get("mlp_bias"))
        self.query_rank = size(raw, "q_lora_rank") if raw.get("q_lora_rank") is not None else None
        self.sizes = LatentSizes(
            heads=config.num_heads,
            latent=size(raw, "kv_lora_rank"),
            rotated=size(raw, "qk_rope_head_dim"),
            plain=size(raw, "qk_nope_head_dim"),
            value=size(raw, "v_head_dim"),
        )

    def attention(self, layer: int) -> Mixer:
        """Return latent attention with its projections."""
        projection, output = self.latent_projections(layer)
        return Attention(projection, output, self.attention_spec(layer), self.ops)

    def latent_projections(self, layer: int) -> tuple[LatentProjection, LatentOutput]:
        """Return the input and output projections of attention."""
        sizes, D, prefix = self.sizes, self.config.hidden_size, self.layer_name(layer, "self_attn")
        expand = self.weights.weight(f"{prefix}.kv_b_proj", sizes.heads * sizes.expanded, sizes.latent)
        keys, values = expand.unflatten(0, (sizes.heads, -1)).split([sizes.plain, sizes.value], dim=1)
        projection = LatentProjection(
            first=self.first_projection(prefix),
            norm=self.inner_norm(f"{prefix}.kv_a_layernorm", sizes.latent),
            absorbed=self.ops.batched(keys.transpose(1, 2)),
            sizes=sizes,
            queries=None if self.query_rank is None else self.low_rank_queries(prefix, self.query_rank),
        )
        output = self.weights.linear(f"{prefix}.o_proj", D, sizes.heads * sizes.value, bias=self.attention_bias)
        return projection, LatentOutput(self.ops.batched(values), output, sizes.heads)

    def first_projection(self, prefix: str) -> LinearLayer:
        """Return the fused projection to the queries (or their low-rank input), the latent and the shared key."""
        sizes, D, rank, bias = self.sizes, self.config.hidden_size, self.query_rank, self.attention_bias
        latent = (f"{prefix}.kv_a_proj_with_mqa", sizes.cached)
        if rank is not None:
            return self.weights.stacked([(f"{prefix}.q_a_proj", rank), latent], D, bias=bias)
        queries = (f"{prefix}.q_proj", sizes.heads * sizes.query)
        if not bias:
            return self.weights.stacked([queries, latent], D)
        return ConcatLinear([self.weights.linear(*queries, D), self.weights.linear(*latent, D, bias=True)])

    def low_rank_queries(self, prefix: str, rank: int) -> LowRankQueries:
        """Return the second part of the low-rank query projection."""
        second = self.weights.linear(f"{prefix}.q_b_proj", self.sizes.heads * self.sizes.query, rank)
        return LowRankQueries(self.inner_norm(f"{prefix}.q_a_layernorm", rank), second)

    def inner_norm(self, name: str, width: int) -> Norm:
        """Return a norm inside attention."""
        return self.ops.rms_norm(self.weights.tensor(f"{name}.weight", width), _INNER_EPS)

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention: all query heads share one key head, the latents."""
        sizes = self.sizes
        return AttentionSpec(
            num_heads=sizes.heads,
            num_kv_heads=1,
            head_dim=sizes.cached,
            scale=self.attention_scale(layer),
            sliding_window=self.config.sliding_windows[layer],
            rotary=self.rotary(layer),
            value_dim=sizes.latent,
            latent=True,
        )

    def attention_scale(self, layer: int) -> float:
        """Scale of heads before absorption; YaRN's ``mscale_all_dim`` applies twice, to queries and keys."""
        rope, scale = self.config.rope_of(layer)[1], math.pow(self.sizes.query, -0.5)
        all_dim = rope.get("mscale_all_dim") if rope.get("rope_type", "default") != "default" else None
        return scale * yarn_magnitude(float(rope["factor"]), float(all_dim)) ** 2 if all_dim else scale

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return tables for the rotated part, interleaved unless ``rope_interleave`` is false.

        Raises ``unsupported`` as ``check_rotated_part``.
        """
        self.check_rotated_part(rope)
        tables = self.tables(rope, self.sizes.rotated)
        return replace(tables, interleaved=bool(self.raw.get("rope_interleave", True)))


class DeepseekV2Builder(DeepseekBuilder):
    """DeepSeek-V2: softmax routing over all experts, or over those of the best groups."""

    defaults: ClassVar[Mapping[str, Any]] = {"first_k_dense_replace": 0}

    def routing(self, router: str, count: int) -> Routing:
        """Return the routing. Raises ``unsupported`` for settings that transformers does not support."""
        raw, method = self.raw, self.raw.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise unsupported(self.config, f"its topk_method is {method!r:.64}")
        if raw.get("norm_topk_prob"):
            reason = "norm_topk_prob, which transformers leaves out"
            raise unsupported(self.config, reason)
        return SoftmaxRouting(
            top_k=size(raw, "num_experts_per_tok"),
            normalize=False,
            scale=float(raw.get("routed_scaling_factor", 1.0)),
            groups=(1, 1) if method == "greedy" else self.groups,
        )


class DeepseekV3Builder(DeepseekBuilder):
    """DeepSeek-V3: sigmoid routing with a correction bias, within groups."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    }


class Glm4MoeLiteBuilder(DeepseekBuilder):
    """GLM-4.7-Flash: DeepSeek-V3 with dense layers where ``mlp_layer_types`` says so, by default the first."""

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense MLP."""
        kinds = self.raw.get("mlp_layer_types")
        return layer < len(kinds) and kinds[layer] == "dense" if kinds else layer == 0


_BUILDERS: Mapping[str, type[DeepseekBuilder]] = {
    "DeepseekV2ForCausalLM": DeepseekV2Builder,
    "DeepseekV3ForCausalLM": DeepseekV3Builder,
    "Glm4MoeLiteForCausalLM": Glm4MoeLiteBuilder,
}


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """One of the architectures of ``_BUILDERS`` from ``weights``. Raises ``unsupported``."""
    return _BUILDERS[config.architecture](config, weights).build()
