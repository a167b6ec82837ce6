"""Hyper-connections: several hidden states per token, which a layer reads and writes with weights that it computes from
all of them (Zhu et al. 2024, arXiv:2409.19606); the independent form of Hunyuan 4, without mixing them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import ActivationLayout, AttentionContext, LinearInput
from aiakq.runtime.layers.attention import Attention, LayerCache
from aiakq.runtime.layers.mlp import MLP


class StreamWeights:
    """Weights in float32 from all hidden states of a token, side by side: sigmoid(scales * (projection(x) / rms(x)) +
    base) + eps.
    """

    def __init__(self, projection: Tensor, scales: Tensor, base: Tensor, norm_eps: float, eps: float, ops: Ops) -> None:
        """projection [N, n * hidden], scales [N] or [1], and base [N], all float32."""
        self.width = projection.shape[1]
        self._projection, self._sigmoid = ops.float_dense(projection), ops.activation("sigmoid")
        # As a product, a sum does not depend on the other rows.
        self._sum = ops.float_dense(torch.ones(1, self.width))
        self._scales, self._base, self._norm_eps, self._eps = scales, base, norm_eps, eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, n * hidden] -> [T, N] float32."""
        values = x.float()
        root = torch.sqrt(self._sum(values * values) / self.width + self._norm_eps)
        weights = self._sigmoid(self._projection(values) / root * self._scales + self._base)
        assert isinstance(weights, Tensor)
        shifted: Tensor = weights + self._eps
        return shifted


def collapsed(x: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of a token's hidden states x [T, n * hidden] with ``weights`` [T, n] float32, [T, hidden]."""
    streams = x.float().unflatten(1, (weights.shape[1], -1))
    total = weights[:, :1] * streams[:, 0]
    for number in range(1, weights.shape[1]):  # in this order for every row
        total += weights[:, number, None] * streams[:, number]
    joined: Tensor = total.to(x.dtype)
    return joined


@dataclass
class HyperConnection:
    """What a part of a layer reads, and where its output is added.

    weights    2 n of them: to read with, and, times ``magnitude``, to write with.
    eps        what ``weights`` has added, which is not multiplied.
    """

    weights: StreamWeights
    streams: int
    magnitude: float
    eps: float

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, n * hidden] -> the input [T, hidden], and the weights [T, n] to write with."""
        before, after = self.weights(x).split(self.streams, dim=1)
        return collapsed(x, before), self.magnitude * (after - self.eps) + self.eps

    def write(self, x: Tensor, output: Tensor, weights: Tensor) -> Tensor:
        """Add ``output`` [T, hidden] to all hidden states x [T, n * hidden] with ``weights`` [T, n]."""
        streams = x.float().unflatten(1, (self.streams, -1))
        added: Tensor = weights[:, :, None] * output.float()[:, None] + streams
        return added.flatten(1).to(x.dtype)


@dataclass
class HyperBlock:
    """A layer of tokens with several hidden states.

    start  whether this is the first layer, which gets embeddings [T, hidden] and repeats them.
    """

    attention_connection: HyperConnection
    attention_norm: Norm
    attention: Attention
    mlp_connection: HyperConnection
    mlp_norm: Norm
    mlp: MLP
    start: bool = False

    @property
    def elements_per_token(self) -> int:
        """Number of elements of a token that exist at once: five times its hidden states, most of them in float32."""
        return 10 * self.attention_connection.weights.width

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, n * hidden], or [T, hidden] in the first layer, -> [T, n * hidden], no residual; see DecoderLayer."""
        assert residual is None, "layers with several hidden states add their residuals themselves"
        if self.start:
            x = x.repeat(1, self.attention_connection.streams)
        read, weights = self.attention_connection.read(x)
        attended = self.attention(_plain(self.attention_norm(read)), positions, cache, context)
        x = self.attention_connection.write(x, attended, weights)
        read, weights = self.mlp_connection.read(x)
        out = self.mlp(self.mlp_norm(read, None, self.mlp.input_layout(len(read))))
        return self.mlp_connection.write(x, out, weights), None


@dataclass
class HyperNorm:
    """The norm of the weighted sum of a token's hidden states."""

    weights: StreamWeights
    norm: Norm

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, layout: ActivationLayout | None = None
    ) -> LinearInput:
        """x [T, n * hidden] -> [T, hidden]; see Norm. There is no residual."""
        assert residual is None, "layers with several hidden states add their residuals themselves"
        return self.norm(collapsed(x, self.weights(x)), None, layout)


def _plain(x: LinearInput) -> Tensor:
    """Narrow the type of a result that was computed without a requested layout."""
    assert isinstance(x, Tensor)
    return x
