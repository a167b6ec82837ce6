"""Gemma 3: norms before and after attention and MLP, per-head norms, and sliding windows except in every sixth layer,
which has a different rotary base (arXiv:2503.19786).
"""

from __future__ import annotations

from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, Rescale, Weights
from aiakq.runtime.models.gemma import GemmaBuilder


class PostNormGemmaBuilder(GemmaBuilder):
    """The common parts of Gemma 2 and 3."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.scale = float(config.raw["query_pre_attn_scalar"]) ** -0.5

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer with norms before and after attention and MLP."""
        attention, mlp = self.attention(layer), self.mlp(layer)
        return Block(
            self.norm(self.layer_name(layer, "input_layernorm")),
            attention,
            self.norm(self.layer_name(layer, "pre_feedforward_layernorm")),
            mlp,
            after_attention=self.norm(self.layer_name(layer, "post_attention_layernorm")),
            after_mlp=self.norm(self.layer_name(layer, "post_feedforward_layernorm")),
        )

    def after_head(self) -> Rescale | None:
        """Return the softcap of the logits, if the config has one."""
        cap = self.config.raw.get("final_logit_softcapping")
        return self.ops.scaling(cap=float(cap)) if cap else None


class Gemma3Builder(PostNormGemmaBuilder):
    """Gemma 3."""

    has_head_norms = True

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention. Raises ``unsupported`` for bidirectional attention."""
        if self.config.raw.get("use_bidirectional_attention"):
            reason = "its attention is bidirectional (use_bidirectional_attention)"
            raise unsupported(self.config, reason)
        return super().attention_spec(layer)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Gemma3ForCausalLM from ``weights``, and the text part of Gemma3ForConditionalGeneration."""
    return Gemma3Builder(config, weights).build()
