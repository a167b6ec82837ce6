"""LFM2: gated short convolutions instead of attention in most layers, and per-head norms in the others."""

from __future__ import annotations

from dataclasses import replace

from aiakq.kernels.recurrent_types import ConvolutionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.recurrent import GatedConvolution
from aiakq.runtime.models.builder import DecoderBuilder, Names
from aiakq.runtime.models.decoder import Decoder, Mixer, Weights
from aiakq.runtime.models.mixture import size


class Lfm2Builder(DecoderBuilder):
    """Llama with convolutions in some layers."""

    has_head_norms = True
    names = Names(
        norm="model.embedding_norm",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        output="self_attn.out_proj",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
    )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(replace(config, intermediate_size=mlp_width(config)), weights)

    def attention(self, layer: int) -> Mixer:
        """Return attention or a convolution, depending on the layer."""
        return super().attention(layer) if self.config.layer_kinds[layer] != "conv" else self.convolution(layer)

    def convolution(self, layer: int) -> GatedConvolution:
        """Return the convolution of a layer with its projections."""
        D, weights, prefix = self.config.hidden_size, self.weights, self.layer_name(layer, "conv")
        bias, taps = bool(self.config.raw.get("conv_bias", False)), size(self.config.raw, "conv_L_cache")
        return GatedConvolution(
            weights.linear(f"{prefix}.in_proj", 3 * D, D, bias=bias),
            ConvolutionSpec(
                weights.tensor(f"{prefix}.conv.weight", D, 1, taps).squeeze(1),
                weights.tensor(f"{prefix}.conv.bias", D) if bias else None,
            ),
            weights.linear(f"{prefix}.out_proj", D, D, bias=bias),
            self.ops,
        )


def mlp_width(config: ModelConfig) -> int:
    """Return the MLP width: 2/3 of the configured size times a multiplier, rounded up, unless already adjusted."""
    raw, width = config.raw, size(config.raw, "block_ff_dim", "intermediate_size")
    if not raw.get("block_auto_adjust_ff_dim", True):
        return width
    width = 2 * width // 3
    multiplier = raw.get("block_ffn_dim_multiplier", 1.0)
    if multiplier is None:
        return width
    multiple = int(raw.get("block_multiple_of") or 256)
    return multiple * -(-int(multiplier * width) // multiple)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Lfm2ForCausalLM from ``weights``."""
    return Lfm2Builder(config, weights).build()
