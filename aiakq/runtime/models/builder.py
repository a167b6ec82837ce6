"""DecoderBuilder: builds a decoder part by part; a family overrides the parts in which it differs from Llama.

Tensor names are data (``Names``), settings are class attributes, and there is one method per part: norms, rotary
tables, projections, attention, MLP, block, output layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.parallel import GATHERED, REPLICATED, ROW, Column, Role, Row
from aiakq.kernels.types import AttentionSpec, RotaryTables
from aiakq.runtime.config.model import ModelConfig, OutputHead
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.attention import Attention, ProjectionStep
from aiakq.runtime.layers.layer_inputs import LayerEnd, LayerInputs
from aiakq.runtime.layers.rotary import GridRotary, new_grid_rotary, rotary_tables
from aiakq.runtime.models.decoder import MLP, Block, Decoder, DecoderLayer, GatedMLP, Mixer, PlainMLP, Rescale, Weights
from aiakq.runtime.models.stage import whole_model

#: Maximum number of outputs of a projection, ten times more than any model has.
_MAX_OUTPUTS = 2**21


def unsupported(config: ModelConfig, reason: str) -> AiakqError:
    """Return the error for a setting of config.json that a family does not support; ``reason`` names it."""
    hint = "--model-impl transformers runs such models if paged attention can compute them."
    return error("unsupported", what=f"A {config.architecture} of this kind ({reason})", hint=hint)


def rotated_part(config: ModelConfig, rotated: object) -> float:
    """Return ``rotary_dim`` ``rotated`` as ``partial_rotary_factor``, whose product with head_dim is cut to an integer.

    Raises ``unsupported`` unless it is an even number of elements of a head.
    """
    size = config.head_dim
    if type(rotated) is not int or not 0 < rotated <= size or rotated % 2:
        raise unsupported(config, f"rotary_dim is {rotated!r:.64}, and head_dim {size}")
    part = rotated / size
    return part if int(size * part) == rotated else math.nextafter(part, 1)


def rows_by_part(groups: int, *widths: int) -> Tensor:
    """Return the permutation [N] int64 that sorts the interleaved outputs of a fused projection by part.

    The N outputs are stored in ``groups`` groups, each with ``widths`` rows of the parts (for example queries, keys and
    values). In the result, the rows of each part are contiguous.

    Raises ``model_malformed`` for an implausible number of outputs, so that a config cannot exhaust memory.
    """
    count = groups * sum(widths)
    if count > _MAX_OUTPUTS:
        raise error("model_malformed", file="config.json", reason=f"a projection has {count} outputs")
    rows = torch.arange(count).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(widths, dim=1)])


@dataclass(frozen=True)
class Names:
    """Names of the parts of a decoder in a checkpoint; the defaults are Llama's.

    Names from ``attention_norm`` on are relative to a layer.

    qkv      names of the three projections, or the name of the fused one.
    gate_up  names of gate and up projection, or of the fused one; for an MLP without a gate, its first layer.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


class DecoderBuilder:
    """Builds Llama; families override attributes and methods.

    qkv_bias, output_bias, mlp_bias, head_bias  whether these linear layers have biases.
    gated                                       whether the MLP is gated.
    has_head_norms                              whether query and key heads have an RMS norm.
    scale                                       factor on the attention scores; None for head_dim ** -0.5.
    rotates_parts                               whether the family may rotate only a part of each head.
    rotates_odd_parts                           whether such a part may be odd, and one element more is rotated.
    qkv_role                                    tensor-parallel role of the QKV projection that is being built.
    """

    names: ClassVar[Names] = Names()
    qkv_bias = output_bias = mlp_bias = head_bias = False
    gated = True
    has_head_norms = False
    rotates_parts = False
    rotates_odd_parts = True
    scale: float | None = None
    qkv_role: Role = GATHERED

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights, self.ops = config, weights, weights.ops
        self._rotary: dict[str, RotaryTables] = {}

    # --- the decoder ---

    def build(self) -> Decoder:
        """Build the model, or the stage given by ``weights.stage``."""
        stage = self.weights.stage or whole_model(self.config.num_layers)
        tied = self.config.has_tied_head
        embedding, head = self.embedding() if stage.is_first or (tied and stage.is_last) else (None, None)
        blocks = [self.block(layer) for layer in stage.layers]
        norm = self.final_norm() if stage.is_last else None
        if head is None and stage.is_last:
            head = self.head() if self.config.head is None else self.scores(self.config.head)
        elif head is not None:
            head = self._adaptable_head(head)
        return Decoder(
            config=self.config,
            ops=self.ops,
            stage=stage,
            embedding=embedding if stage.is_first else None,
            blocks=blocks,
            norm=norm,
            head=head if stage.is_last else None,
            output_width=self.output_width(),
            positions=self.positions() if stage.is_first else None,
            project_in=self.project_in() if stage.is_first else None,
            project_out=self.project_out() if stage.is_last else None,
            after_embedding=self.after_embedding() if stage.is_first else None,
            after_head=self.after_head() if stage.is_last and self.config.head is None else None,
            grid_rotary=self.grid_rotary(),
            layer_inputs=self.layer_inputs() if stage.is_first else None,
            layer_ends=[end for layer in stage.layers if (end := self.layer_end(layer)) is not None],
        )

    def embedding(self) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """Return the embedding, and the output layer if it is tied to it."""
        config = self.config
        tied = config.has_tied_head
        name = f"{self.names.embedding}.weight"
        if tied and not self.weights.has(name) and self.weights.has(f"{self.names.head}.weight"):
            name = f"{self.names.head}.weight"  # some files hold the tied weight under this name only
        bias = self._tied_bias() if tied else None
        return self.weights.embedding(name, config.vocab_size, self.embedding_width, tied=tied, bias=bias)

    def _tied_bias(self) -> Tensor | None:
        """Return the bias of the tied output layer, which most files do not have."""
        name = f"{self.names.head}.bias"
        stored = self.head_bias and self.weights.has(name)
        return self.weights.tensor(name, self.config.vocab_size) if stored else None

    def _adaptable_head(self, head: LinearLayer) -> LinearLayer:
        """Return the tied output layer with support for LoRA adapters of its own."""
        table, shape = f"{self.names.embedding}.weight", (self.config.vocab_size, self.embedding_width)
        return self.weights.adaptable(
            head, self.names.head, *shape, lambda: self.weights.tensor(table, *shape), self._tied_bias()
        )

    def head(self) -> LinearLayer:
        """Return the output layer, if it is not tied."""
        return self.weights.linear(
            self.names.head, self.config.vocab_size, self.config.hidden_size, bias=self.head_bias
        )

    @property
    def embedding_width(self) -> int:
        """Width of the embedding and of the last hidden states."""
        return self.config.hidden_size

    def output_width(self) -> int:
        """See Decoder."""
        if self.config.head is None:
            return self.config.vocab_size
        return self.config.head.num_labels or self.embedding_width

    def scores(self, head: OutputHead) -> LinearLayer | None:
        """Return the layer from the last hidden states to scores; None if the hidden states are returned."""
        if head.label_tokens is not None:
            name = self.names.embedding if self.config.tie_word_embeddings else self.names.head
            logits = self.weights.weight(name, self.config.vocab_size, self.embedding_width)
            negative, positive = (logits[token].float() for token in head.label_tokens)
            return self.weights.dense((positive - negative)[None].to(self.ops.dtype), role=REPLICATED)
        if not head.num_labels:
            return None
        has_bias = self.weights.has("score.bias")
        return self.weights.linear("score", head.num_labels, self.embedding_width, bias=has_bias, role=REPLICATED)

    def positions(self) -> EmbeddingLayer | None:
        """Return the embedding of learned positions, or None."""
        return None

    def after_embedding(self) -> Rescale | None:
        """See Decoder."""
        return None

    def layer_inputs(self) -> LayerInputs | None:
        """See Decoder."""
        return None

    def project_in(self) -> LinearLayer | None:
        """See Decoder."""
        return None

    def project_out(self) -> LinearLayer | None:
        """See Decoder."""
        return None

    def final_norm(self) -> Norm | None:
        """Return the norm before the output layer."""
        return self.norm(self.names.norm)

    def after_head(self) -> Rescale | None:
        """See Decoder."""
        return None

    # --- one layer ---

    def layer_name(self, layer: int, name: str) -> str:
        """Return the full name of a part of a layer."""
        return f"{self.names.layers}.{layer}.{name}"

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer."""
        attention, mlp = self.attention(layer), self.mlp(layer)
        return Block(
            self.norm(self.layer_name(layer, self.names.attention_norm)),
            attention,
            self.norm(self.layer_name(layer, self.names.mlp_norm)),
            mlp,
        )

    def layer_end(self, layer: int) -> LayerEnd | None:
        """Return what follows a layer; None in families without."""
        return None

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Return a norm over ``width`` elements, by default the hidden size."""
        return self.ops.rms_norm(self.norm_weight(name, width or self.config.hidden_size), self.config.norm_eps)

    def norm_weight(self, name: str, width: int) -> Tensor:
        """Return the weight [width] of an RMS norm."""
        return self.weights.tensor(f"{name}.weight", width)

    def attention(self, layer: int) -> Mixer:
        """Return the attention of a layer with its projections, or the layer that replaces it."""
        config, spec, before = self.config.of_layer(layer), self.attention_spec(layer), self.before_attention(layer)
        # What comes before attention may read all heads.
        self.qkv_role = GATHERED if before else Column(spec, "qkv")
        qkv = self.qkv(layer)
        output = self.weights.linear(
            self.layer_name(layer, self.names.output),
            config.hidden_size,
            config.num_heads * config.head_dim,
            bias=self.output_bias,
            role=Row(spec),
        )
        return self.attention_between(layer, qkv, output, spec, before)

    def attention_between(
        self, layer: int, qkv: LinearLayer, output: LinearLayer, spec: AttentionSpec, before: list[ProjectionStep]
    ) -> Attention:
        """Return the attention of a layer between its projections."""
        return Attention(qkv, output, spec, self.ops, before)

    def qkv(self, layer: int) -> LinearLayer:
        """Return the fused projection to queries, keys and values, in this order, with the role ``qkv_role``."""
        D, widths = self.config.hidden_size, self.qkv_widths()
        names = [self.layer_name(layer, name) for name in self.names.qkv]
        if len(names) == 1:
            return self.weights.linear(names[0], sum(widths), D, bias=self.qkv_bias, role=self.qkv_role)
        return self.weights.stacked(list(zip(names, widths, strict=True)), D, bias=self.qkv_bias, role=self.qkv_role)

    def qkv_widths(self) -> tuple[int, int, int]:
        """Return the number of columns of queries, keys and values."""
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return queries, keys, keys

    def before_attention(self, layer: int) -> list[ProjectionStep]:
        """Return the steps between the QKV projection and attention."""
        return []

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention."""
        config = self.config.of_layer(layer)
        q_norm, k_norm = self.head_norms(layer)
        return AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5 if self.scale is None else self.scale,
            sliding_window=config.sliding_windows[layer],
            rotary=self.rotary(layer),
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=config.norm_eps,
        )

    def head_norms(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights [D] of the RMS norms of query heads and of key heads, or None."""
        if not self.has_head_norms:
            return None, None
        D = self.config.of_layer(layer).head_dim
        q_norm, k_norm = (
            self.norm_weight(self.layer_name(layer, name), D) for name in (self.names.q_norm, self.names.k_norm)
        )
        return q_norm, k_norm

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return the rotary tables of a layer, shared by all layers of its kind; None without rotary embedding."""
        kind, rope = self.config.rope_of(layer)
        if kind not in self._rotary:
            self._rotary[kind] = self.rotary_tables(rope)
        return self._rotary[kind]

    def rotary_tables(self, rope: Any) -> RotaryTables:
        """Return the rotary tables for the parameters ``rope``. Raises ``unsupported`` as ``check_rotated_part``."""
        self.check_rotated_part(rope)
        return self.tables(rope, self.config.head_dim)

    def check_rotated_part(self, rope: Mapping[str, Any]) -> None:
        """Raise ``unsupported`` for ``partial_rotary_factor`` in a family whose transformers class ignores it, or
        cannot compute it.
        """
        part = rope.get("partial_rotary_factor", 1.0)
        if part != 1 and not self.rotates_parts and rope.get("rope_type") != "proportional":
            what = f"partial_rotary_factor {part} in a {self.config.architecture}"
            raise error("unsupported", what=what, hint="transformers ignores it there; remove it from config.json.")
        rotated = int(self.config.head_dim * part)
        if rotated % 2 and not self.rotates_odd_parts:
            raise unsupported(self.config, f"{rotated} elements of each head are rotated, which are no pairs")

    def tables(self, rope: Mapping[str, Any], width: int) -> RotaryTables:
        """Return the tables for heads of size ``width``. Behind their rows are those for short texts, if LongRoPE
        distinguishes them (``Model.short_start``), or those of ``grid_rotary``.
        """
        config, device = self.config, self.ops.device
        rows = config.num_positions + (0 if config.grid is None else config.grid.rows)
        tables = rotary_tables(rope, width, config.max_position, device, config.context, rows)
        if config.short_context is None:
            return tables
        rows = min(config.short_context, config.num_positions)
        short = rotary_tables(rope, width, config.max_position, device, config.short_context, rows)
        return RotaryTables(torch.cat([tables.cosines, short.cosines]), torch.cat([tables.sines, short.sines]))

    def grid_rotary(self) -> GridRotary | None:
        """Return the rows of the rotary tables that tokens of images write for themselves; None without any.

        Raises ``model_malformed`` for parameters that transformers' class rejects.
        """
        config, grid = self.config, self.config.grid
        if grid is None:
            return None
        tables = list(self._rotary.values())
        return new_grid_rotary(config.rope, grid.sizes, grid.alternates, tables, config.num_positions)

    def layer_norm(self, name: str, width: int | None = None) -> Norm:
        """Return a layer norm with weight and bias."""
        D = width or self.config.hidden_size
        weight, bias = (self.weights.tensor(f"{name}.{part}", D) for part in ("weight", "bias"))
        return self.ops.layer_norm(weight, bias, self.config.norm_eps)

    def mlp_width(self, layer: int) -> int:
        """Return the intermediate size of the MLP of a layer."""
        return self.config.intermediate_size

    def mlp(self, layer: int) -> MLP:
        """Return the MLP of a layer."""
        D, F = self.config.hidden_size, self.mlp_width(layer)
        names, act = (
            [self.layer_name(layer, name) for name in self.names.gate_up],
            activation(self.config.activation, self.ops),
        )
        down = self.weights.linear(self.layer_name(layer, self.names.down), D, F, bias=self.mlp_bias, role=ROW)
        role = Column(down, "gu" if self.gated else "u")
        first = (
            self.weights.linear(names[0], F * (1 + self.gated), D, bias=self.mlp_bias, role=role)
            if len(names) == 1
            else self.weights.stacked([(name, F) for name in names], D, bias=self.mlp_bias, role=role)
        )
        return GatedMLP(first, down, act) if self.gated else PlainMLP(first, down, act)


class LayerNormBuilder(DecoderBuilder):
    """Families with layer norms with biases, and an MLP without a gate."""

    gated = False

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Return a layer norm with weight and bias."""
        return self.layer_norm(name, width)
