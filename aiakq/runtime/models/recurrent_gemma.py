"""RecurrentGemma: Gemma with Griffin's recurrent blocks, and windowed attention in every third layer (De et al. 2024,
arXiv:2402.19427).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from aiakq.errors import error
from aiakq.formats.config_values import malformed
from aiakq.kernels.recurrent_types import ConvolutionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.gated_linear_recurrence import GatedLinearRecurrence
from aiakq.runtime.models.builder import Names, unsupported
from aiakq.runtime.models.decoder import Decoder, Mixer, Rescale, Weights
from aiakq.runtime.models.gemma import GemmaBuilder
from aiakq.runtime.models.mixture import size


class RecurrentGemmaBuilder(GemmaBuilder):
    """RecurrentGemma."""

    rotates_parts = True
    mlp_bias = True
    names = Names(
        norm="model.final_norm",
        attention_norm="temporal_pre_norm",
        mlp_norm="channel_pre_norm",
        qkv=tuple(f"temporal_block.{name}_proj" for name in "qkv"),
        output="temporal_block.o_proj",
        gate_up=("mlp_block.gate_proj", "mlp_block.up_proj"),
        down="mlp_block.down_proj",
    )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(replace(config, intermediate_size=config.intermediate_size // 2), weights)
        self.output_bias = True
        raw = config.raw
        self.channels = config.hidden_size if raw.get("lru_width") is None else size(raw, "lru_width")
        self.cap = float(raw["logits_soft_cap"])
        if self.cap <= 0:
            raise malformed("logits_soft_cap", self.cap, "a positive number")
        if self.channels % config.num_heads:
            raise malformed("lru_width", self.channels, f"a multiple of {config.num_heads} heads")
        if config.head_dim * config.num_heads != config.hidden_size:
            raise unsupported(config, f"its head_dim is {config.head_dim}")
        if weights.ops.device_type != "cpu":
            what = f"The recurrence of a {config.architecture} on a GPU"
            raise error("unsupported", what=what, hint="It runs with --device cpu.")

    def after_embedding(self) -> Rescale:
        """Return the multiplier sqrt(hidden_size), rounded to bfloat16 in all dtypes."""
        return self.ops.scaling(torch.tensor(self.config.hidden_size**0.5, dtype=torch.bfloat16).item())

    def after_head(self) -> Rescale:
        """Return the soft cap of logits."""
        return self.ops.scaling(cap=self.cap)

    def attention(self, layer: int) -> Mixer:
        """Return attention or a recurrent block, depending on the layer."""
        is_recurrent = self.config.layer_kinds[layer] == "linear_attention"
        return self.recurrent_block(layer) if is_recurrent else super().attention(layer)

    def recurrent_block(self, layer: int) -> GatedLinearRecurrence:
        """Return the recurrent block of a layer."""
        weights, prefix, taps = self.weights, self.layer_name(layer, "temporal_block"), self.config.raw["conv1d_width"]
        D, C, H = self.config.hidden_size, self.channels, self.config.num_heads
        block, unit = C // H, f"{prefix}.rg_lru"
        gates = ("input_gate", "recurrent_gate")
        # Stored as [H, K, N].
        products = [weights.tensor(f"{unit}.{gate}_weight", H, block, block).transpose(1, 2) for gate in gates]
        biases = [weights.tensor(f"{unit}.{gate}_bias", H, block, dtype=torch.float32) for gate in gates]
        return GatedLinearRecurrence(
            weights.stacked([(f"{prefix}.linear_y", C), (f"{prefix}.linear_x", C)], D, bias=True),
            ConvolutionSpec(
                weights.tensor(f"{prefix}.conv_1d.weight", C, 1, taps).squeeze(1),
                weights.tensor(f"{prefix}.conv_1d.bias", C),
            ),
            self.ops.batched(torch.cat(products, dim=1)),
            torch.cat(biases, dim=1),
            weights.tensor(f"{unit}.recurrent_param", C, dtype=torch.float32),
            activation(self.config.activation, self.ops),
            weights.linear(f"{prefix}.linear_out", D, C, bias=True),
            self.ops,
        )


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """RecurrentGemmaForCausalLM from ``weights``. Raises ``unsupported`` and ``model_malformed``."""
    return RecurrentGemmaBuilder(config, weights).build()
