"""LFM3: LFM2 with sliding windows, gated heads, norms after attention and MLP, and rotary bases by kind of layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import GATHERED, REPLICATED, Column
from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import Attention, HeadGatedAttention, ProjectionStep
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, Weights
from aiakq.runtime.models.lfm2 import Lfm2Builder


class Lfm3Builder(Lfm2Builder):
    """LFM3."""

    names = replace(Lfm2Builder.names, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", output="self_attn.o_proj")

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        DecoderBuilder.__init__(self, config, weights)  # the width of its MLP is as configured
        self.qkv_bias = self.output_bias = bool(config.raw["attention_bias"])

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer, with norms after attention and MLP if the config has them."""
        block = super().block(layer)
        if not self.config.raw["use_sandwich_norm"]:
            return block
        assert isinstance(block, Block)
        block.after_attention = self.norm(self.layer_name(layer, "post_operator_norm"))
        block.after_mlp = self.norm(self.layer_name(layer, "post_ffn_norm"))
        return block

    def attention_between(
        self, layer: int, qkv: LinearLayer, output: LinearLayer, spec: AttentionSpec, before: list[ProjectionStep]
    ) -> Attention:
        """Return attention, with a gate per head if the config has them."""
        H, D, ops, weights = spec.num_heads, spec.value_dim, self.ops, self.weights
        if not self.config.raw["use_attention_gate"]:
            return super().attention_between(layer, qkv, output, spec, before)
        gate, module = (self.layer_name(layer, f"self_attn.{name}") for name in ("gate_proj", "g_proj"))
        if weights.has(f"{module}.weight") or weights.is_packed(module):
            gate = module  # transformers reads this name, too
        repeated = torch.eye(H, dtype=ops.dtype, device=ops.device).repeat_interleave(D, 0)
        return HeadGatedAttention(
            qkv,
            weights.linear(gate, H, self.config.hidden_size, role=REPLICATED),
            weights.dense(repeated, role=Column(spec, "q") if output.has_local_inputs else GATHERED),
            output,
            spec,
            ops,
            before,
        )


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Lfm3ForCausalLM from ``weights``."""
    return Lfm3Builder(config, weights).build()
