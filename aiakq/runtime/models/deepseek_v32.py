"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention selects positions by an index (arXiv:2512.02556)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from aiakq.errors import error
from aiakq.formats.config_values import malformed
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.indexed_attention import IndexedLatentAttention, Indexer
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.deepseek import DeepseekBuilder
from aiakq.runtime.models.mixture import size

#: Kinds of layers in ``indexer_types`` -> whether they have an index of their own.
INDEX_KINDS = {"full": True, "shared": False, "F": True, "S": False}
_MLP_KINDS = {"dense": True, "sparse": False}


class DeepseekV32Builder(DeepseekBuilder):
    """DeepSeek-V3.2: an index in every layer.

    interleaved_index  whether the index rotates pairs of adjacent elements, as attention does.
    layer_class        class of the attention layers.
    index_eps          epsilon of the norm of index keys, which config.json does not set.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    interleaved_index = False
    index_eps = 1e-6
    layer_class: type[IndexedLatentAttention] = IndexedLatentAttention

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        raw, kinds = self.raw, self.raw.get("layer_types")
        if weights.ops.device_type != "cpu":
            what = f"The sparse attention of a {config.architecture} on a GPU"
            raise error("unsupported", what=what, hint="It runs with --device cpu.")
        if kinds and set(kinds) != {"indexed_attention"}:
            raise unsupported(config, f"layer_types has {sorted(set(kinds) - {'indexed_attention'})[0]!r:.64}")
        self.top_k, self.index_heads = size(raw, "index_topk"), size(raw, "index_n_heads")
        self.index_size = size(raw, "index_head_dim")
        if self.query_rank is None:
            raise malformed("q_lora_rank", None, "a positive integer")
        if self.index_size < self.sizes.rotated:
            raise malformed("index_head_dim", self.index_size, f"at least qk_rope_head_dim, {self.sizes.rotated}")
        self._has_index = self.layers_with_index()
        first = 0 if weights.stage is None else weights.stage.first
        if not self._has_index[0]:
            raise unsupported(config, "its first layer has no index of its own")
        if not self._has_index[first]:
            what = f"A pipeline stage that begins with layer {first}, which shares the index of the layer before it,"
            raise error("unsupported", what=what, hint="Set -pp to 1, or use -tp instead.")

    def layers_with_index(self) -> list[bool]:
        """Return whether each layer has an index of its own. Raises ``model_malformed``."""
        return [True] * self.config.num_layers

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense MLP."""
        kinds = self.raw.get("mlp_layer_types")
        if kinds is None:
            return super().is_dense(layer)
        return self.listed("mlp_layer_types", kinds, _MLP_KINDS)[layer]

    def attention(self, layer: int) -> IndexedLatentAttention:
        """Return latent attention with an index."""
        projection, output = self.latent_projections(layer)
        spec = self.attention_spec(layer)
        assert spec.rotary is not None
        indexer = self.indexer(layer, spec.rotary) if self._has_index[layer] else None
        without = replace(spec, rotary=None)
        gate = self.value_gate(layer)
        return self.layer_class(projection, output, without, self.ops, spec.rotary, indexer, self.top_k, gate)

    def value_gate(self, layer: int) -> LinearLayer | None:
        """Return the projection to gates of the values of attention; None in families without."""
        return None

    def indexer(self, layer: int, rotary: RotaryTables) -> Indexer:
        """Return the index of a layer, whose weights per head stay float32 as in transformers."""
        prefix, D = self.layer_name(layer, "self_attn.indexer"), self.config.hidden_size
        heads, width = self.index_heads, self.index_size
        assert self.query_rank is not None
        weight, bias = (self.weights.tensor(f"{prefix}.k_norm.{part}", width) for part in ("weight", "bias"))
        of_heads = self.weights.tensor(f"{prefix}.weights_proj.weight", heads, D, dtype=torch.float32)
        return Indexer(
            queries=self.weights.linear(f"{prefix}.wq_b", heads * width, self.query_rank),
            keys=self.weights.linear(f"{prefix}.wk", width, D),
            norm=self.ops.layer_norm(weight, bias, self.index_eps),
            weights=self.ops.float_dense(of_heads),
            rotary=self.index_tables(rotary),
            heads=heads,
            size=width,
            top_k=self.top_k,
        )

    def index_tables(self, rotary: RotaryTables) -> RotaryTables:
        """Return the tables of attention with the pairs of the index, the same object for all layers."""
        if self._index_tables is None:
            self._index_tables = replace(rotary, interleaved=self.interleaved_index)
        return self._index_tables

    _index_tables: RotaryTables | None = None


class GlmMoeDsaBuilder(DeepseekV32Builder):
    """GLM-5: layers may attend to the positions that the index of a layer before them selected (arXiv:2603.12201)."""

    interleaved_index = True

    def layers_with_index(self) -> list[bool]:
        """Return whether each layer has an index of its own. Raises ``model_malformed``."""
        raw = self.raw
        for key in ("indexer_types", "index_topk_pattern"):
            if raw.get(key) is not None:
                return self.listed(key, raw[key], INDEX_KINDS)
        every, offset = max(raw["index_topk_freq"], 1), raw["index_skip_topk_offset"]
        return [max(layer - offset + 1, 0) % every == 0 for layer in range(self.config.num_layers)]


_BUILDERS: Mapping[str, type[DeepseekV32Builder]] = {
    "DeepseekV32ForCausalLM": DeepseekV32Builder,
    "GlmMoeDsaForCausalLM": GlmMoeDsaBuilder,
}


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """One of the architectures of ``_BUILDERS`` from ``weights``. Raises ``unsupported`` and ``model_malformed``."""
    return _BUILDERS[config.architecture](config, weights).build()
