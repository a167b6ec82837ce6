"""A.X K2: DeepSeek-V3.2 with gates on the values of attention, and with gated norms."""

from __future__ import annotations

from aiakq.kernels.ops.parallel import REPLICATED
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.indexed_attention import FusedGateAttention
from aiakq.runtime.layers.latent_attention import LowRankQueries
from aiakq.runtime.layers.self_gated_norm import SelfGatedNorm
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import Block, Decoder, Weights
from aiakq.runtime.models.deepseek_v32 import DeepseekV32Builder
from aiakq.runtime.models.mixture import size


class AXK2Builder(DeepseekV32Builder):
    """A.X K2."""

    layer_class = FusedGateAttention

    def block(self, layer: int) -> Block:
        """Return a layer, whose norms have gates but for that before a dense MLP."""
        attention, mlp = self.attention(layer), self.mlp(layer)
        first, second = (self.layer_name(layer, name) for name in (self.names.attention_norm, self.names.mlp_norm))
        mlp_norm = self.norm(second) if self.is_dense(layer) else self.gated_norm(second)
        return Block(self.gated_norm(first), attention, mlp_norm, mlp)

    def gated_norm(self, name: str) -> SelfGatedNorm:
        """Return the norm ``name`` with its gates."""
        D, rank = self.config.hidden_size, size(self.raw, "gated_norm_rank")
        return SelfGatedNorm(
            self.norm(f"{name}.norm"),
            self.weights.linear(f"{name}.W_down", rank, D, role=REPLICATED),
            self.weights.linear(f"{name}.W_up", D, rank, role=REPLICATED),
            self.ops.activation("silu"),
            self.ops.activation("sigmoid"),
            self.ops.scaling(),
        )

    def low_rank_queries(self, prefix: str, rank: int) -> LowRankQueries:
        """Return the second part of the projection to queries and gates."""
        outputs = self.sizes.heads * (self.sizes.query + self.sizes.value)
        own = f"{prefix}.q_gate_proj"  # transformers' name, which files that it or aiakq quantized have
        is_own = self.weights.has(f"{own}.weight") or self.weights.is_packed(own)
        second = self.weights.linear(own if is_own else f"{prefix}.q_b_proj", outputs, 2 * rank)
        return LowRankQueries(self.inner_norm(f"{prefix}.q_a_layernorm", rank), second)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """AXK2ForCausalLM from ``weights``. Raises ``unsupported`` and ``model_malformed``."""
    if config.raw.get("n_group") not in (None, 1):
        reason = f"n_group is {config.raw['n_group']!r:.64}; experts outside of the chosen groups count as zero there"
        raise unsupported(config, reason)
    return AXK2Builder(config, weights).build()
