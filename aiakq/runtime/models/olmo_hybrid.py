"""OLMo-Hybrid: the gated delta rule in most layers, OLMo 3's attention in the others (Ai2 2026)."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.kernels.ops.parallel import REPLICATED
from aiakq.kernels.recurrent_types import ConvolutionSpec, RecurrenceSpec
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.config.rope import is_rotary
from aiakq.runtime.layers.recurrent import GatedRecurrence
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, Weights
from aiakq.runtime.models.mixture import size
from aiakq.runtime.models.olmo2 import Olmo2Builder

#: Norms of layers -> their names in released files; transformers writes those of all layers so.
_OTHER_NAMES = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
#: Of the norms after the recurrence, whatever the other norms have.
_EPSILON = 1e-5


class OlmoHybridBuilder(Olmo2Builder):
    """OLMo 3 with layers of the gated delta rule, which have norms before them, not after them."""

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return the rotary tables, or None if the file says that the base of the frequencies is null."""
        return super().rotary(layer) if is_rotary(self.config.raw) else None

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer."""
        if self.config.layer_kinds[layer] != "linear_attention":
            return super().block(layer)
        first, second = (self.norm(self.layer_name(layer, name)) for name in ("input_layernorm", self.names.mlp_norm))
        return Block(first, self.delta_rule(layer), second, self.mlp(layer))

    def norm_weight(self, name: str, width: int) -> Tensor:
        """Return the weight [width] of a norm, which released files and those of transformers call otherwise."""
        module, _, last = name.rpartition(".")
        other = f"{module}.{_OTHER_NAMES.get(last, last)}"
        return super().norm_weight(other if self.weights.has(f"{other}.weight") else name, width)

    def delta_rule(self, layer: int) -> GatedRecurrence:
        """Return the gated delta rule of a layer with its projections. Raises ``model_malformed``, ``unsupported``."""
        config, weights, prefix = self.config, self.weights, self.layer_name(layer, "linear_attn")
        spec, D = self.recurrence(prefix), config.hidden_size
        if config.activation not in ("silu", "swish"):
            raise unsupported(config, f"its activation function is {config.activation:.64}")
        keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        names = (("q", keys), ("k", keys), ("v", values), ("g", values))
        heads = [(f"{prefix}.{name}_proj", spec.num_heads) for name in ("b", "a")]
        weight = weights.tensor(f"{prefix}.o_norm.weight", spec.value_dim).repeat(spec.num_heads)
        return GatedRecurrence(
            weights.stacked([(f"{prefix}.{name}_proj", width) for name, width in names], D),
            weights.stacked(heads, D, role=REPLICATED),
            ConvolutionSpec(self.taps(prefix, keys, values), silu=True),
            spec,
            self.ops.gated_norm(weight, spec.value_dim, _EPSILON, gate_first=False),
            weights.linear(f"{prefix}.o_proj", D, values),
            self.ops,
        )

    def recurrence(self, prefix: str) -> RecurrenceSpec:
        """Return the recurrence of the layer at ``prefix``. Raises ``model_malformed``."""
        raw, weights = self.config.raw, self.weights
        sizes = {"linear_num_key_heads": self.config.num_heads, "linear_num_value_heads": self.config.num_heads}
        sizes |= {name: value for name, value in raw.items() if name.startswith("linear_") and value is not None}
        heads, key_heads = size(sizes, "linear_num_value_heads"), size(sizes, "linear_num_key_heads")
        sizes.setdefault("linear_key_head_dim", int(0.75 * self.config.hidden_size / key_heads))
        key_dim = size(sizes, "linear_key_head_dim")
        sizes.setdefault("linear_value_head_dim", 2 * key_dim)
        if heads % key_heads:
            reason = f"{heads} value heads cannot share {key_heads} key heads"
            raise error("model_malformed", file="config.json", reason=reason)
        return RecurrenceSpec(
            "delta_rule",
            num_heads=heads,
            num_key_heads=key_heads,
            key_dim=key_dim,
            value_dim=size(sizes, "linear_value_head_dim"),
            a_log=weights.tensor(f"{prefix}.A_log", heads, dtype=torch.float32),
            step_bias=weights.tensor(f"{prefix}.dt_bias", heads, dtype=torch.float32),
            strength=2.0 if raw["linear_allow_neg_eigval"] else 1.0,
        )

    def taps(self, prefix: str, keys: int, values: int) -> Tensor:
        """Return the taps [channels, K] of the convolution, in one tensor or in three.

        Files that transformers wrote have three of equal size, however many channels queries and values have.
        """
        count = size(self.config.raw, "linear_conv_kernel_dim")
        if self.weights.has(f"{prefix}.conv1d.weight"):
            return self.weights.tensor(f"{prefix}.conv1d.weight", 2 * keys + values, 1, count).squeeze(1)
        names = [f"{prefix}.{name}_conv1d.weight" for name in "qkv"]
        widths = [keys, keys, values]
        if not self.weights.has_shape(names[0], keys, 1, count):
            widths = [len(part) for part in torch.empty(sum(widths), 0).chunk(3)]
        parts = [self.weights.tensor(name, width, 1, count) for name, width in zip(names, widths, strict=True)]
        return torch.cat(parts).squeeze(1)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """OlmoHybridForCausalLM from ``weights``."""
    return OlmoHybridBuilder(config, weights).build()
