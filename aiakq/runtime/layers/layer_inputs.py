"""Inputs that every layer reads of a token besides its hidden state (Gemma 3n and 4): an embedding of its own, and a
part of a projection of the token's embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.scaling import Scaling


@dataclass
class LayerInputs:
    """The inputs scale * embedding + norm(projection) of all layers.

    embedding   table of the inputs [V, L * P] of L layers, P elements each.
    projection  from the embedding of a token to L * P.
    norm        of the P projected elements of a layer, times its factor in the sum.
    scaled      scale * x + added.
    width       P.
    layers      L.
    """

    embedding: EmbeddingLayer
    projection: LinearLayer
    norm: Norm
    scaled: Scaling
    width: int
    layers: int

    @property
    def elements_per_token(self) -> int:
        """Number of elements per token that exist at once."""
        return 2 * self.layers * self.width

    def __call__(self, token_ids: Tensor, x: Tensor) -> LayerInputRows:
        """token_ids [T] int64, embeddings x [T, hidden] -> the inputs of all layers."""
        return LayerInputRows(self, self.embedding(token_ids), self.projection(x))


@dataclass
class LayerInputRows:
    """The inputs of T tokens before their norms and sums: ``rows`` [T, L * P] and ``projected`` [T, L * P]."""

    inputs: LayerInputs
    rows: Tensor
    projected: Tensor

    def write(self, layer: int, out: Tensor) -> None:
        """Write the inputs of a layer to out [T, P]."""
        columns = slice(layer * self.inputs.width, (layer + 1) * self.inputs.width)
        normed = self.inputs.norm(self.projected[:, columns])
        assert isinstance(normed, Tensor)
        self.inputs.scaled(self.rows[:, columns], normed, out=out)


@dataclass
class GatedInput:
    """norm(projection(act(gate(x)) * input)), which is added to the output of a layer.

    gate        from the hidden size to P.
    projection  from P to the hidden size.
    width       P.
    """

    gate: LinearLayer
    projection: LinearLayer
    norm: Norm
    act: Activation
    copy: Scaling
    width: int

    def __call__(self, x: Tensor, inputs: LayerInputRows, layer: int) -> Tensor:
        """x [T, hidden], the sum of a layer's output and its residual -> [T, hidden]."""
        both = torch.empty(len(x), 2 * self.width, dtype=x.dtype, device=x.device)
        self.copy(self.gate(x), out=both[:, : self.width])
        inputs.write(layer, both[:, self.width :])
        normed = self.norm(self.projection(self.act.gated(both, self.projection.input_layout(len(x)))))
        assert isinstance(normed, Tensor)
        return normed


class LayerEnd(Protocol):
    """What follows a layer."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, inputs: LayerInputRows | None
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden], which is modified, and residual [T, hidden] or None: see DecoderLayer."""


@dataclass
class ScaledEnd:
    """The gated input of a layer, and a factor on the hidden states (Gemma 4).

    layer   number of the layer.
    add     a Scaling by one.
    gated   None in models whose layers read hidden states alone.
    factor  a Scaling by the layer's factor; None for 1.
    """

    layer: int
    add: Scaling
    gated: GatedInput | None = None
    factor: Scaling | None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, inputs: LayerInputRows | None
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden], which is modified, and residual [T, hidden] or None: see LayerEnd."""
        if self.gated is not None:
            assert inputs is not None, "only the first stage has the inputs of layers"
            x = self._sum(x, residual)
            residual = self.gated(x, inputs, self.layer)
        if self.factor is None:
            return x, residual
        x = self._sum(x, residual)
        return self.factor(x, out=x), None

    def _sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return x if residual is None else self.add(x, residual, out=x)
