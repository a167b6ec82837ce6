"""Gemma 4: norms of queries, keys and values, other heads in layers with full attention, inputs of its own for every
layer, and last layers that read the keys and values of earlier ones; some models have experts beside the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.routing import SoftmaxRouting
from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.types import AttentionContext, LinearInput, RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import KeysAsValues, LayerCache
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.layers.layer_inputs import ScaledEnd
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import MLP, Block, Decoder, DecoderLayer, Mixer, Weights
from aiakq.runtime.models.layer_inputs import LayerInputsBuilder
from aiakq.runtime.models.mixture import Mixture, size


@dataclass(frozen=True)
class FactoredRouting(SoftmaxRouting):
    """Softmax routing whose weights are multiplied by a factor of each expert after they are normalized.

    factors  [E] float32; None for 1.
    """

    factors: Tensor | None = None
    kind: ClassVar[str] = ""

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        weights, selected = super().__call__(scores)
        return weights if self.factors is None else weights * self.factors[selected], selected


@dataclass
class MixtureBlock:
    """A block with a dense MLP and experts beside it, which read the same hidden states through norms of their own.

    dense, dense_norm  the dense MLP, and the norm of its output.
    mlp                the experts.
    router_norm        norm of what the router reads.
    experts_norm       norm of what the experts read.
    after_experts      norm of their output.
    after_mlp          norm of the sum of both outputs.
    add                a Scaling by one, used for this sum.
    """

    attention_norm: Norm
    attention: Mixer
    after_attention: Norm
    mlp_norm: Norm
    dense: MLP
    dense_norm: Norm
    mlp: SparseMLP
    router_norm: Norm
    experts_norm: Norm
    after_experts: Norm
    after_mlp: Norm
    add: Scaling

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden]; see DecoderLayer."""
        normed = self.attention_norm(x, residual, self.attention.input_layout(len(x)))
        attended = _plain(self.after_attention(self.attention(normed, positions, cache, context)))
        dense = self.dense(self.mlp_norm(x, attended, self.dense.input_layout(len(x))))
        routed = self.mlp(self.experts_norm(x), _plain(self.router_norm(x)))
        both = self.add(_plain(self.dense_norm(dense)), _plain(self.after_experts(routed)))
        return x, _plain(self.after_mlp(both))


def _plain(x: LinearInput) -> Tensor:
    """Narrow the type of a result that was computed without a requested layout."""
    assert isinstance(x, Tensor)
    return x


class Gemma4Builder(LayerInputsBuilder):
    """Gemma 4."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        if self.input_width and config.raw["vocab_size_per_layer_input"] < config.vocab_size:
            raise unsupported(config, "vocab_size_per_layer_input is below vocab_size")

    # --- attention ---

    def qkv(self, layer: int) -> LinearLayer:
        """Return the fused projection; in layers with full attention, keys may be the values, too."""
        config, names = self.config.of_layer(layer), [self.layer_name(layer, name) for name in self.names.qkv]
        keys = config.num_kv_heads * config.head_dim
        parts = list(zip(names, (config.num_heads * config.head_dim, keys, keys), strict=True))
        same = config.raw["attention_k_eq_v"] and config.sliding_windows[layer] is None
        first = self.weights.stacked(
            parts[:2] if same else parts, config.hidden_size, bias=self.qkv_bias, role=self.qkv_role
        )
        return KeysAsValues(first, keys, self.ops) if same else first

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return the rotary tables of a layer, whose heads have the size of its kind."""
        kind, rope = self.config.rope_of(layer)
        if kind not in self._rotary:
            self.check_rotated_part(rope)
            self._rotary[kind] = self.tables(rope, self.config.of_layer(layer).head_dim)
        return self._rotary[kind]

    # --- MLP and experts ---

    def mlp_width(self, layer: int) -> int:
        """Return the intermediate size of a layer, which is doubled in those that read others' keys and values."""
        is_double = self.config.raw["use_double_wide_mlp"] and layer in self.config.cache_sources
        return self.config.intermediate_size * (2 if is_double else 1)

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer with norms before and after attention and MLP, and maybe experts."""
        norms = {name: self.norm(self.layer_name(layer, name)) for name in _NORMS}
        first, after_attention, before, after = norms.values()
        attention, mlp = self.attention(layer), self.mlp(layer)
        if not self.config.raw["enable_moe_block"]:
            return Block(first, attention, before, mlp, after_attention=after_attention, after_mlp=after)
        D = self.config.hidden_size
        scale = self.weights.tensor(self.layer_name(layer, "router.scale"), D).float() * D**-0.5
        return MixtureBlock(
            attention_norm=first,
            attention=attention,
            after_attention=after_attention,
            mlp_norm=before,
            dense=mlp,
            dense_norm=self.norm(self.layer_name(layer, "post_feedforward_layernorm_1")),
            mlp=self.experts(layer),
            router_norm=self.ops.rms_norm(scale, self.config.norm_eps),
            experts_norm=self.norm(self.layer_name(layer, "pre_feedforward_layernorm_2")),
            after_experts=self.norm(self.layer_name(layer, "post_feedforward_layernorm_2")),
            after_mlp=after,
            add=self.ops.scaling(),
        )

    def experts(self, layer: int) -> SparseMLP:
        """Return the experts of a layer. Raises ``model_malformed``."""
        raw, prefix = self.config.raw, self.layer_name(layer, "")[:-1]
        count, width = size(raw, "num_experts"), size(raw, "moe_intermediate_size")
        factors = self.weights.tensor(f"{prefix}.router.per_expert_scale", count, dtype=torch.float32)
        routing = FactoredRouting(size(raw, "top_k_experts"), normalize=True, factors=factors)
        names = ("gate_proj", "up_proj", "down_proj")
        return Mixture(prefix, prefix, names, count, width, routing, "router.proj").build(self.config, self.weights)

    def layer_end(self, layer: int) -> ScaledEnd:
        """Return the gated input of a layer, and its factor."""
        factor = self.weights.tensor(self.layer_name(layer, "layer_scalar"), 1, dtype=torch.float32)
        value = 1.0 if factor.is_meta else float(factor)
        add = self.ops.scaling()
        return ScaledEnd(layer, add, self.gated_input(layer), self.ops.scaling(value) if value != 1 else None)


#: The norms of a layer: before and after attention, before and after the MLP.
_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Gemma4ForCausalLM from ``weights``, and the text part of Gemma4ForConditionalGeneration."""
    return Gemma4Builder(config, weights).build()
