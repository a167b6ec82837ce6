"""LayerInputsBuilder: the common parts of Gemma 3n and 4: norms of queries, keys and values, inputs of all layers, and
last layers that read the keys and values of earlier ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.kernels.ops.parallel import Column, Row
from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.attention import Attention, ProjectionNorms, ProjectionStep
from aiakq.runtime.layers.embedding import PartialTable
from aiakq.runtime.layers.layer_inputs import GatedInput, LayerInputs
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Mixer, Rescale, Weights


class LayerInputsBuilder(DecoderBuilder):
    """The common parts of Gemma 3n and 4."""

    has_head_norms = True
    scale = 1.0

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))
        self.input_width = int(config.raw["hidden_size_per_layer_input"])
        stage = weights.stage
        if (self.input_width or config.cache_sources) and stage is not None and not (stage.is_first and stage.is_last):
            what = f"A {config.architecture} whose layers read more than hidden states, in pipeline stages"
            raise error("unsupported", what=what, hint="Set -pp to 1, or use -tp instead.")

    def after_embedding(self) -> Rescale | None:
        """Return the multiplier sqrt(hidden_size), rounded to the activation dtype."""
        return self.ops.scaling(self._rounded_root(self.config.hidden_size))

    def after_head(self) -> Rescale | None:
        """Return the softcap of the logits, if the config has one."""
        cap = self.config.raw.get("final_logit_softcapping")
        return self.ops.scaling(cap=float(cap)) if cap else None

    def _rounded_root(self, number: int) -> float:
        return float(torch.tensor(number**0.5, dtype=self.ops.dtype).item())

    # --- attention ---

    def attention(self, layer: int) -> Mixer:
        """Return the attention of a layer, without keys and values if it reads those of an earlier one."""
        if layer not in self.config.cache_sources:
            return super().attention(layer)
        config, spec, D = self.config.of_layer(layer), self.attention_spec(layer), self.config.hidden_size
        width = config.num_heads * config.head_dim
        query, output = (self.layer_name(layer, name) for name in (self.names.qkv[0], self.names.output))
        return Attention(
            self.weights.linear(query, width, D, bias=self.qkv_bias, role=Column(spec, "q")),
            self.weights.linear(output, D, width, bias=self.output_bias, role=Row(spec)),
            spec,
            self.ops,
        )

    def before_attention(self, layer: int) -> list[ProjectionStep]:
        """Return the norms of value heads, which have no weights."""
        config = self.config.of_layer(layer)
        head = config.head_dim
        norm = self.ops.rms_norm(torch.ones(head, dtype=self.ops.dtype, device=self.ops.device), config.norm_eps)
        first, count = (config.num_heads + config.num_kv_heads) * head, config.num_kv_heads
        return [ProjectionNorms([norm] * count, [head] * count, self.ops, first)]

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention."""
        return replace(super().attention_spec(layer), reads_only=layer in self.config.cache_sources)

    def head_norms(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights [D] of the norms of query heads, and of key heads if the layer has some."""
        if layer not in self.config.cache_sources:
            return super().head_norms(layer)
        name = self.layer_name(layer, self.names.q_norm)
        return self.norm_weight(name, self.config.of_layer(layer).head_dim), None

    # --- inputs of layers ---

    def layer_inputs(self) -> LayerInputs | None:
        """Return the inputs of all layers: the mean of two parts, times sqrt(2)."""
        config, P = self.config, self.input_width
        if not P:
            return None
        table, width = "model.embed_tokens_per_layer.weight", P * config.num_layers
        vocabulary = config.raw["vocab_size_per_layer_input"]
        embedding, _ = self.weights.embedding(table, vocabulary, width, tied=False)
        weight = self.norm_weight("model.per_layer_projection_norm", P).float() * 2**-0.5
        # The projection is divided by sqrt(hidden_size) before its norm: the same as another epsilon.
        return LayerInputs(
            embedding=embedding if vocabulary >= config.vocab_size else PartialTable(embedding, vocabulary),
            projection=self.weights.linear("model.per_layer_model_projection", width, config.hidden_size),
            norm=self.ops.rms_norm(weight, config.norm_eps * config.hidden_size),
            scaled=self.ops.scaling(self._rounded_root(P) * 2**-0.5),
            width=P,
            layers=config.num_layers,
        )

    def gated_input(self, layer: int) -> GatedInput | None:
        """Return what a layer does with its input; None in models without."""
        D, P = self.config.hidden_size, self.input_width
        if not P:
            return None
        return GatedInput(
            gate=self.weights.linear(self.layer_name(layer, "per_layer_input_gate"), P, D),
            projection=self.weights.linear(self.layer_name(layer, "per_layer_projection"), D, P),
            norm=self.norm(self.layer_name(layer, "post_per_layer_input_norm")),
            act=activation(self.config.activation, self.ops),
            copy=self.ops.scaling(),
            width=P,
        )
