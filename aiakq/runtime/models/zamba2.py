"""Zamba 2: Mamba 2, and before some of its layers one of a few transformer blocks that these share, with low-rank
layers of their own (arXiv:2411.15242).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from aiakq.errors import error
from aiakq.formats.config_values import malformed
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.layers.recurrent import GatedRecurrence, HeadedStateSpace
from aiakq.runtime.layers.shared_block import (
    LowRankSum,
    SharedBlock,
    SharedBlockLayer,
    SharedBlockMixer,
    StepEmbeddings,
)
from aiakq.runtime.models.builder import DecoderBuilder, Names, unsupported
from aiakq.runtime.models.decoder import Decoder, DecoderLayer, GatedMLP, MixerBlock, Weights
from aiakq.runtime.models.mamba2 import StateSpace, hybrid_width
from aiakq.runtime.models.mixture import size

#: Epsilon of the gated norms of Mamba 2, which config.json does not set.
_GATED_EPS = 1e-5


class SharedBlocksBuilder(DecoderBuilder):
    """The common parts of Zamba and Zamba 2.

    hybrid   numbers of the layers that use a transformer block.
    gate_up  names of the first linear layers of its MLP.
    """

    names = Names(norm="model.final_layernorm")
    gate_up: ClassVar[tuple[str, ...]] = ("gate_up_proj",)

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        width, heads = 2 * config.hidden_size, config.num_heads
        if config.raw.get("head_dim") not in (None, width // heads):
            raise malformed("attention_head_dim", config.raw["head_dim"], f"2 * hidden_size / {heads}")
        if width % heads:
            raise malformed("num_attention_heads", heads, f"a divisor of {width}")
        super().__init__(replace(config, head_dim=width // heads), weights)
        self.scale = (self.config.head_dim / 2) ** -0.5
        self.hybrid = [layer for layer, kind in enumerate(config.layer_kinds) if kind == "hybrid"]
        self.embeddings = StepEmbeddings(self.ops)
        self._shared: dict[str, tuple[Norm, LinearLayer, LinearLayer, Norm, LinearLayer, LinearLayer]] = {}
        if "full_attention" in config.layer_kinds:
            raise malformed("layers_block_type", config.raw.get("layer_types"), "a list of mamba and hybrid")
        if self.hybrid and weights.stage is not None and len(weights.stage.layers) < config.num_layers:
            what = f"A pipeline stage of a {config.architecture}, whose layers read the embeddings of the first stage,"
            raise error("unsupported", what=what, hint="Set -pp to 1, or use -tp instead.")

    def after_embedding(self) -> StepEmbeddings:
        """Return what keeps the embeddings for the hybrid layers."""
        return self.embeddings

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer."""
        if layer not in self.hybrid:
            norm = self.norm(self.layer_name(layer, self.names.attention_norm))
            return MixerBlock(norm, self.mamba(self.layer_name(layer, "mamba")))
        own = self.layer_name(layer, "mamba_decoder")
        norm, mamba = self.norm(f"{own}.{self.names.attention_norm}"), self.mamba(f"{own}.mamba")
        mixer = SharedBlockMixer(self.transformer(layer), norm, mamba, self.embeddings, self.ops)
        return SharedBlockLayer(mixer, self.ops.scaling())

    def mamba(self, prefix: str) -> GatedRecurrence | HeadedStateSpace:
        """Return the recurrent layer at ``prefix``."""
        raise NotImplementedError

    def transformer(self, layer: int) -> SharedBlock:
        """Return what the hybrid layer ``layer`` uses of its transformer block."""
        raise NotImplementedError

    def shared(self, prefix: str) -> tuple[Norm, LinearLayer, LinearLayer, Norm, LinearLayer, LinearLayer]:
        """Return the norms and linear layers of the transformer block at ``prefix``, the same objects for all uses."""
        if prefix not in self._shared:
            D, F, bias, weights = self.config.hidden_size, self.config.intermediate_size, self.mlp_bias, self.weights
            queries, keys, values = self.qkv_widths()
            parts = zip(("q_proj", "k_proj", "v_proj"), (queries, keys, values), strict=True)
            self._shared[prefix] = (
                self.norm(f"{prefix}.input_layernorm", 2 * D),
                weights.stacked([(f"{prefix}.self_attn.{name}", width) for name, width in parts], 2 * D),
                weights.linear(f"{prefix}.self_attn.o_proj", D, queries),
                self.norm(f"{prefix}.pre_ff_layernorm"),
                self.first_of_mlp(f"{prefix}.feed_forward"),
                weights.linear(f"{prefix}.feed_forward.down_proj", D, F, bias=bias),
            )
        return self._shared[prefix]

    def first_of_mlp(self, prefix: str) -> LinearLayer:
        """Return the gate and up projections of the MLP at ``prefix``."""
        D, F = self.config.hidden_size, self.config.intermediate_size
        names = [f"{prefix}.{name}" for name in self.gate_up]
        if len(names) == 1:
            return self.weights.linear(names[0], 2 * F, D, bias=self.mlp_bias)
        return self.weights.stacked([(name, F) for name in names], D)

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None: there are no positions."""
        return None


class Zamba2Builder(SharedBlocksBuilder):
    """Zamba 2."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        raw = config.raw
        self.mlp_bias = bool(raw.get("add_bias_linear", False))
        self.rank, self.blocks = size(raw, "adapter_rank"), size(raw, "num_mem_blocks")
        if raw.get("use_shared_attention_adapter") and config.num_kv_heads != config.num_heads:
            raise unsupported(config, "adapters of attention whose keys are shared by heads")

    def mamba(self, prefix: str) -> GatedRecurrence:
        """Return the Mamba 2 layer at ``prefix``."""
        raw = self.config.raw
        wide, heads, bias = hybrid_width(raw), size(raw, "n_mamba_heads"), bool(raw.get("add_bias_linear", False))
        sizes = StateSpace(
            heads=heads,
            head_dim=wide // heads,
            state=size(raw, "mamba_d_state"),
            groups=size(raw, "mamba_ngroups"),
            taps=size(raw, "mamba_d_conv"),
            bias=bias,
            convolution_bias=True,
            output_bias=bias,
            step_limits=(float(raw["time_step_min"]), math.inf),
        )
        config = replace(self.config, norm_eps=_GATED_EPS, activation="silu")
        return sizes.build(config, self.weights, prefix, wide)

    def transformer(self, layer: int) -> SharedBlock:
        """Return what the hybrid layer ``layer`` uses of its transformer block, with its own adapters."""
        use, D, F = self.hybrid.index(layer), self.config.hidden_size, self.config.intermediate_size
        prefix = self.layer_name(self.hybrid[use % self.blocks], "shared_transformer")
        norm, qkv, output, mlp_norm, gate_up, down = self.shared(prefix)
        width = self.config.num_heads * self.config.head_dim
        if self.config.raw.get("use_shared_attention_adapter"):
            names = [f"{prefix}.self_attn.linear_{part}_adapter_list.{use}" for part in "qkv"]
            qkv = LowRankSum(qkv, [self.adapter(name, 2 * D, width) for name in names], self.ops)
        adapter = self.adapter(f"{prefix}.feed_forward.gate_up_proj_adapter_list.{use}", D, 2 * F)
        act = activation(self.config.activation, self.ops)
        return SharedBlock(
            norm,
            Attention(qkv, output, self.attention_spec(layer), self.ops),
            mlp_norm,
            GatedMLP(LowRankSum(gate_up, [adapter], self.ops), down, act),
            self.weights.linear(self.layer_name(layer, "linear"), D, D),
        )

    def adapter(self, name: str, k: int, n: int) -> tuple[LinearLayer, LinearLayer]:
        """Return the low-rank layers ``name`` with K inputs and N outputs."""
        return self.weights.linear(f"{name}.0", self.rank, k), self.weights.linear(f"{name}.1", n, self.rank)

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return rotary tables if config.json says ``use_mem_rope``."""
        return DecoderBuilder.rotary(self, layer) if self.config.raw.get("use_mem_rope") else None


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Zamba2ForCausalLM from ``weights``. Raises ``unsupported`` and ``model_malformed``."""
    return Zamba2Builder(config, weights).build()
