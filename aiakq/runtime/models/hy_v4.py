"""Hunyuan 4: DeepSeek-V3.2's attention with gates and sinks, and hyper-connections between layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from aiakq.formats.config_values import malformed
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import AttentionSpec, RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.hyper_connections import HyperBlock, HyperConnection, HyperNorm, StreamWeights
from aiakq.runtime.layers.indexed_attention import Indexer
from aiakq.runtime.models.builder import Names, unsupported
from aiakq.runtime.models.decoder import MLP, Decoder, Weights
from aiakq.runtime.models.deepseek_v32 import INDEX_KINDS, DeepseekV32Builder
from aiakq.runtime.models.mixture import size
from aiakq.runtime.models.qwen2_moe import gated


class HyV4Builder(DeepseekV32Builder):
    """Hunyuan 4."""

    defaults: ClassVar[Mapping[str, Any]] = {"first_k_dense_replace": 1, "rope_interleave": False}

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.index_eps = config.norm_eps
        self.streams, self.eps = size(self.raw, "hc_mult"), float(self.raw["hc_eps"])
        self.expert_limit = float(self.raw["swiglu_limit"])
        if self.expert_limit <= 0:
            raise unsupported(config, f"swiglu_limit is {self.expert_limit}")

    def layers_with_index(self) -> list[bool]:
        """Return whether each layer has an index of its own. Raises ``model_malformed``."""
        if self.raw.get("indexer_types") is not None:
            return self.listed("indexer_types", self.raw["indexer_types"], INDEX_KINDS)
        return [layer == 0 or layer % 4 == 1 for layer in range(self.config.num_layers)]

    def block(self, layer: int) -> HyperBlock:
        """Return a layer; the first one makes the hidden states of a token from its embedding."""
        names = self.names
        return HyperBlock(
            attention_connection=self.connection(layer, "hc_attn_layer"),
            attention_norm=self.norm(self.layer_name(layer, names.attention_norm)),
            attention=self.attention(layer),
            mlp_connection=self.connection(layer, "hc_mlp_layer"),
            mlp_norm=self.norm(self.layer_name(layer, names.mlp_norm)),
            mlp=self.mlp(layer),
            start=layer == 0,
        )

    def connection(self, layer: int, name: str) -> HyperConnection:
        """Return the hyper-connection of attention or the MLP of a layer."""
        spellings = (f"{name}.hc_pre.hc_", f"hc_pre.{name}.hc_", f"{name}.hc_")
        n, prefix = self.streams, self.stored(*(self.layer_name(layer, each) for each in spellings), ending="fn")
        scales = self.floats(f"{prefix}scale", 2).repeat_interleave(n)
        weights = self.stream_weights(prefix, 2 * n, scales)
        return HyperConnection(weights, n, float(self.raw["hc_magnitude"]), self.eps)

    def stored(self, published: str, *others: str, ending: str = ".weight") -> str:
        """Return the one of these names that the checkpoint has with ``ending``, by default the first.

        Where transformers' patterns for published names are ambiguous, it saves others.
        """
        weights = self.weights
        found = (name for name in others if weights.has(f"{name}{ending}") or weights.is_packed(name))
        return next(found, published)

    def stream_weights(self, prefix: str, count: int, scales: Tensor) -> StreamWeights:
        """Return the ``count`` weights that are computed from all hidden states of a token; scales [count] or [1]."""
        projection = self.floats(f"{prefix}fn", count, self.streams * self.config.hidden_size)
        base = self.floats(f"{prefix}base", count)
        return StreamWeights(projection, scales, base, self.config.norm_eps, self.eps, self.ops)

    def floats(self, name: str, *shape: int) -> Tensor:
        """Return a tensor [*shape] of hyper-connections, which stay float32."""
        return self.weights.tensor(name, *shape, dtype=torch.float32)

    def final_norm(self) -> Norm:
        """Return the norm of the weighted sum of a token's hidden states."""
        norm = super().final_norm()
        assert norm is not None
        spellings = (f"model.{each}.hc_head_" for each in ("hc_head", "hc_pre.hc_head", "hc_head.hc_pre"))
        prefix = self.stored(*spellings, ending="fn")
        return HyperNorm(self.stream_weights(prefix, self.streams, self.floats(f"{prefix}scale", 1)), norm)

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention, with a sink per head."""
        name = self.layer_name(layer, "self_attn.learnable_sink_param")
        sinks = self.weights.tensor(name, self.sizes.heads, dtype=torch.float32)
        return replace(super().attention_spec(layer), sinks=sinks)

    def value_gate(self, layer: int) -> LinearLayer:
        """Return the projection to the gates of the values."""
        published, own = (self.layer_name(layer, f"self_attn.{name}") for name in ("linear_gate", "gate_proj"))
        outputs = self.sizes.heads * self.sizes.value
        return self.weights.linear(self.stored(published, own), outputs, self.config.hidden_size)

    def mlp(self, layer: int) -> MLP:
        """Return routed and shared experts, or a dense MLP."""
        gate = self.gate_name(self.layer_name(layer, "mlp"))
        self.names = replace(Names(), gate_up=(f"mlp.{gate}", "mlp.up_proj"))  # type: ignore[misc]
        return super().mlp(layer)

    def shared_experts(self, name: str, width: int) -> MLP:
        """Return the shared experts in the module ``name``."""
        return gated(self.config, self.weights, name, width, gate=self.gate_name(name))

    def gate_name(self, module: str) -> str:
        """Return the name of the gate's projection in the MLP ``module``."""
        return self.stored(f"{module}.gate_proj", f"{module}.linear_gate").rpartition(".")[2]

    def indexer(self, layer: int, rotary: RotaryTables) -> Indexer:
        """Return the index of a layer, which rotates the last elements."""
        if self.index_size < rotary.rotated:
            raise malformed("index_head_dim", self.index_size, f"at least {rotary.rotated}")
        return replace(super().indexer(layer, rotary), first_rotated=self.index_size - rotary.rotated)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """HYV4ForCausalLM from ``weights``. Raises ``unsupported`` and ``model_malformed``."""
    return HyV4Builder(config, weights).build()
