"""Gemma 2: Gemma with norms also after attention and MLP, softcapped attention scores and logits, and a sliding window
in every second layer (arXiv:2408.00118).
"""

from __future__ import annotations

from dataclasses import replace

from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.gemma3 import PostNormGemmaBuilder


class Gemma2Builder(PostNormGemmaBuilder):
    """Gemma 2."""

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention, with a softcap of the scores."""
        cap = self.config.raw.get("attn_logit_softcapping")
        return replace(super().attention_spec(layer), softcap=float(cap or 0))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Gemma2ForCausalLM from ``weights``."""
    return Gemma2Builder(config, weights).build()
