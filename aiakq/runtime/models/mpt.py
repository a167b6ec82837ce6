"""MPT: ALiBi, layer norms without biases, a fused QKV projection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.ops.norm import Norm
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.alibi import AlibiBuilder
from aiakq.runtime.models.builder import Names, unsupported
from aiakq.runtime.models.decoder import Decoder, Weights


class MptBuilder(AlibiBuilder):
    """MPT."""

    names = Names(
        embedding="transformer.wte",
        layers="transformer.blocks",
        norm="transformer.norm_f",
        attention_norm="norm_1",
        mlp_norm="norm_2",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        gate_up=("ffn.up_proj",),
        down="ffn.down_proj",
    )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.attn: dict[str, Any] = dict(config.raw.get("attn_config") or {})
        width = int(config.raw.get("expansion_ratio", 4)) * config.hidden_size
        super().__init__(replace(config, intermediate_size=width, activation="gelu"), weights)
        if self.attn.get("softmax_scale") is not None:
            self.scale = float(self.attn["softmax_scale"])

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Return a layer norm without a bias, with transformers' epsilon."""
        weight = self.weights.tensor(f"{name}.weight", width or self.config.hidden_size)
        return self.ops.layer_norm(weight, None, float(self.config.raw.get("layer_norm_epsilon", 1e-5)))

    def slopes(self) -> Tensor:
        """Return the slopes [H] of the next power of two; with fewer heads, every second slope comes first."""
        heads = self.config.num_heads
        power = 1 << (heads - 1).bit_length()
        largest = float(self.attn.get("alibi_bias_max", 8))
        all_slopes = 2.0 ** (-largest * torch.arange(1, power + 1, dtype=torch.float32) / power)
        return all_slopes if power == heads else torch.cat([all_slopes[1::2], all_slopes[::2]])[:heads]


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """MptForCausalLM from ``weights``. Raises ``unsupported`` for settings that transformers does not support."""
    raw, attn = config.raw, dict(config.raw.get("attn_config") or {})
    required: dict[str, Any] = {
        "alibi": (attn.get("alibi", True), True),
        "qk_ln": (bool(attn.get("qk_ln", False)), False),
        "clip_qkv": (attn.get("clip_qkv"), None),
        "prefix_lm": (bool(attn.get("prefix_lm", False)), False),
        "attn_type": (attn.get("attn_type", "multihead_attention"), "multihead_attention"),
        "no_bias": (raw.get("no_bias", True), True),
    }
    for name, (actual, wanted) in required.items():
        if actual != wanted:
            raise unsupported(config, f"{name} is {actual}")
    return MptBuilder(config, weights).build()
