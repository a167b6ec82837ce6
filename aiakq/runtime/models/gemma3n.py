"""Gemma 3n: several hidden states per token (AltUp), low-rank layers beside attention, sparse activations, inputs for
every layer, and last layers that read the keys and values of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.formats.config_values import SIZE, read_value
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.parallel import REPLICATED
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.altup import AltUp, Laurel, Magnitude, StreamsBlock, StreamsEnd, StreamsNorm, StreamsStart
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.layers.embedding import MediaTable
from aiakq.runtime.layers.mlp import GaussianTopK
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import MLP, Decoder, DecoderLayer, GatedMLP, Rescale, Weights
from aiakq.runtime.models.layer_inputs import LayerInputsBuilder


class Gemma3nBuilder(LayerInputsBuilder):
    """Gemma 3n."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        raw = config.raw
        read_value(raw, SIZE, "hidden_size_per_layer_input")
        self.streams, self.active = int(raw["altup_num_inputs"]), int(raw["altup_active_idx"])
        if self.streams == 1:
            raise unsupported(config, "altup_num_inputs is 1")
        self.magnitude = Magnitude(config.hidden_size, self.ops)
        self.media: Mapping[str, Mapping[str, Any]] = raw.get("media_embedders") or {}
        self.check_media()

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer; the first one makes the hidden states of a token from its embedding."""
        first, after_attention, before, after = (self.norm(self.layer_name(layer, name)) for name in _NORMS)
        attention = self.attention(layer)
        assert isinstance(attention, Attention)
        return StreamsBlock(
            altup=self.altup(layer),
            attention_norm=first,
            laurel=self.laurel(layer),
            attention=attention,
            after_attention=after_attention,
            mlp_norm=before,
            mlp=self.mlp(layer),
            after_mlp=after,
            add=self.ops.scaling(),
            mean=self.ops.scaling(2**-0.5),
            start=self.start() if layer == 0 else None,
        )

    def embedding(self) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """Return the embedding of all tokens, scaled but for those of images and sounds, and the output layer."""
        table, head = super().embedding()
        if not self.media:
            return table, head
        scale = self.ops.scaling(self._rounded_root(self.config.hidden_size))
        rows = torch.cat([self.media_rows(name, part) for name, part in self.media.items()])
        return MediaTable(table, scale, self.config.vocab_size - len(rows), rows), head

    def check_media(self) -> None:
        """Raise ``unsupported`` unless the tokens of images and sounds are the last ones, without gaps."""
        expected = self.config.vocab_size
        for name, part in reversed(list(self.media.items())):
            first, rows = (int(read_value(part, SIZE, key)) for key in ("vocab_offset", "vocab_size"))
            if first + rows != expected:
                reason = f"{name} embeds {rows} tokens from {first} on, and not all below {expected}"
                raise unsupported(self.config, reason)
            expected = first

    def media_rows(self, name: str, part: Mapping[str, Any]) -> Tensor:
        """Return the embeddings of the tokens of images, or sounds, as the module ``name`` makes them, [N, hidden]."""
        rows, width = (int(read_value(part, SIZE, key)) for key in ("vocab_size", "hidden_size"))
        prefix, D, eps = f"model.{name}", self.config.hidden_size, float(part["rms_norm_eps"])
        values = self.weights.tensor(f"{prefix}.embedding.weight", rows, width, dtype=torch.float32)
        weight = self.weights.tensor(f"{prefix}.hard_embedding_norm.weight", width, dtype=torch.float32)
        projection = self.weights.tensor(f"{prefix}.embedding_projection.weight", D, width, dtype=torch.float32)
        projected = F.linear(F.rms_norm(values, [width], weight, eps), projection)
        return F.rms_norm(projected, [D], None, eps).to(self.ops.dtype)

    def after_embedding(self) -> Rescale | None:
        """Return the multiplier of embeddings; None if some are not multiplied, which the embedding knows."""
        return None if self.media else super().after_embedding()

    def start(self) -> StreamsStart:
        """Return what makes the hidden states of a token from its embedding."""
        D = self.config.hidden_size
        parts = [(f"model.altup_projections.{number}", D) for number in range(self.streams - 1)]
        return StreamsStart(self.weights.stacked(parts, D), self.magnitude)

    def final_norm(self) -> Norm:
        """Return the mean of a token's hidden states and its norm."""
        D = self.config.hidden_size
        names = [f"model.altup_unembed_projections.{number}" for number in range(self.streams - 1)]
        projections = [self.weights.linear(name, D, D) for name in names]
        norm = super().final_norm()
        assert norm is not None
        return StreamsNorm(projections, self.magnitude, norm)

    def altup(self, layer: int) -> AltUp:
        """Return the coefficients of a layer."""
        D, n = self.config.hidden_size, self.streams
        modules = {"modality_router": (n, D), "prediction_coefs": (n * n, n), "correction_coefs": (n, n)}
        router, predictions, corrections = (
            self.weights.linear(self.layer_name(layer, f"altup.{name}"), *shape, role=REPLICATED)
            for name, shape in modules.items()
        )
        norm = self.norm(self.layer_name(layer, "altup.router_norm"))
        return AltUp(norm, router, self.ops.scaling(1 / D, cap=1.0), predictions, corrections, n, D, self.active)

    def laurel(self, layer: int) -> Laurel:
        """Return the low-rank layers beside the attention of a layer."""
        D, rank = self.config.hidden_size, int(read_value(self.config.raw, SIZE, "laurel_rank"))
        left, right = (self.layer_name(layer, f"laurel.linear_{side}") for side in ("left", "right"))
        return Laurel(
            self.weights.linear(left, rank, D),
            self.weights.linear(right, D, rank),
            self.norm(self.layer_name(layer, "laurel.post_laurel_norm")),
            self.ops.scaling(),
        )

    def mlp_width(self, layer: int) -> int:
        """Return the intermediate size of a layer."""
        return int(self.config.raw["intermediate_size"][layer])

    def mlp(self, layer: int) -> MLP:
        """Return the MLP of a layer, maybe with sparse activations, whose threshold is that of a whole row."""
        share = self.config.raw["activation_sparsity_pattern"][layer]
        if not share:
            return super().mlp(layer)
        D, F = self.config.hidden_size, self.mlp_width(layer)
        parts = [(self.layer_name(layer, name), F) for name in self.names.gate_up]
        return GatedMLP(
            self.weights.stacked(parts, D),
            self.weights.linear(self.layer_name(layer, self.names.down), D, F),
            activation(self.config.activation, self.ops),
            GaussianTopK(share, F, self.ops),
        )

    def layer_end(self, layer: int) -> StreamsEnd:
        """Return what adds the gated input of a layer to the hidden states."""
        name = self.layer_name(layer, "altup.correct_output_scale")
        factors = self.weights.tensor(name, self.config.hidden_size)
        gated = self.gated_input(layer)
        assert gated is not None
        scaled = factors if self.config.raw["altup_correct_scale"] else None
        return StreamsEnd(layer, self.ops.scaling(), gated, scaled, self.config.hidden_size, self.active)


#: The norms of a layer: before and after attention, before and after the MLP.
_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Gemma3nForCausalLM from ``weights``, and the text part of Gemma3nForConditionalGeneration."""
    return Gemma3nBuilder(config, weights).build()
