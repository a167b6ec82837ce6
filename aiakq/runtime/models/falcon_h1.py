"""Falcon-H1: attention and Mamba 2 in parallel in every layer, and multipliers of most projections
(Zuo et al. 2025, arXiv:2507.22448).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from aiakq.errors import error
from aiakq.formats.config_values import malformed
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.layers.recurrent import ParallelMixers
from aiakq.runtime.models.builder import DecoderBuilder, Names
from aiakq.runtime.models.decoder import MLP, Block, Decoder, DecoderLayer, GatedMLP, Rescale, Weights
from aiakq.runtime.models.mamba2 import StateSpace, hybrid_width
from aiakq.runtime.models.mixture import size


class FalconH1Builder(DecoderBuilder):
    """Llama with Mamba 2 beside attention, and multipliers."""

    names = Names(
        norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        raw = config.raw
        self.qkv_bias = self.output_bias = bool(raw["attention_bias"])
        self.mlp_bias = bool(raw["mlp_bias"])
        self.scale = config.head_dim**-0.5 * self.multiplier("key_multiplier")
        self.mlp_multipliers = multipliers(raw, "mlp_multipliers", 2)

    def multiplier(self, name: str) -> float:
        """Return a multiplier of config.json."""
        return float(self.config.raw[name])

    def after_embedding(self) -> Rescale:
        """Return the layer that multiplies embeddings."""
        return self.ops.scaling(self.multiplier("embedding_multiplier"))

    def after_head(self) -> Rescale:
        """Return the factor of the logits."""
        return self.ops.scaling(self.multiplier("lm_head_multiplier"))

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer whose MLP outputs are multiplied."""
        block = super().block(layer)
        assert isinstance(block, Block)
        block.after_mlp = self.ops.scaling(self.mlp_multipliers[1])
        return block

    def mlp(self, layer: int) -> MLP:
        """Return the MLP, whose gate is multiplied before the activation function."""
        mlp = super().mlp(layer)
        assert isinstance(mlp, GatedMLP)
        mlp.gate_step = self.ops.scaling(self.mlp_multipliers[0])
        return mlp

    def attention(self, layer: int) -> ParallelMixers:
        """Return attention and Mamba 2."""
        attention, raw = super().attention(layer), self.config.raw
        assert isinstance(attention, Attention)
        total = hybrid_width(raw) if raw["mamba_d_ssm"] is None else size(raw, "mamba_d_ssm")
        sizes = StateSpace.of_hybrid({**raw, "mamba_d_head": self.state_head_dim(total)})
        sizes = replace(
            sizes,
            output_bias=bool(raw["projectors_bias"]),
            norm=("gate_last" if raw["mamba_norm_before_gate"] else "gate_first") if raw["mamba_rms_norm"] else "none",
            multipliers=multipliers(raw, "ssm_multipliers", 5),
        )
        return ParallelMixers(
            attention,
            sizes.build(self.config, self.weights, self.layer_name(layer, "mamba"), total),
            before=(self.multiplier("attention_in_multiplier"), self.multiplier("ssm_in_multiplier")),
            after=(self.multiplier("attention_out_multiplier"), self.multiplier("ssm_out_multiplier")),
            ops=self.ops,
        )

    def state_head_dim(self, total: int) -> int:
        """Return the size of the heads of the state space layers, which have ``total`` outputs."""
        raw = self.config.raw
        heads = size(raw, "mamba_n_heads")
        if raw["mamba_d_head"] not in (None, "auto"):
            return size(raw, "mamba_d_head")
        if total % heads:
            raise error("model_malformed", file="config.json", reason=f"{heads} heads cannot share {total} outputs")
        return total // heads


def multipliers(raw: Mapping[str, object], name: str, count: int) -> Sequence[float]:
    """Return ``count`` multipliers of config.json, of one if it has none. Raises ``model_malformed``."""
    values = raw.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list | tuple) or len(values) != count:
        raise malformed(name, values, f"{count} numbers")
    return tuple(map(float, values))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """FalconH1ForCausalLM from ``weights``."""
    return FalconH1Builder(config, weights).build()
