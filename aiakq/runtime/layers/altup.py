"""Layers of tokens with several hidden states, of which a layer computes with one and corrects all (AltUp; Baykal et
al. 2023, arXiv:2301.13310), in Gemma 3n.

Between layers the n states of a token lie side by side, [T, n * hidden], so that everything else sees one wide row.
What is computed here rather than by an operation is elementwise and in float32, so that no row depends on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.types import ActivationLayout, AttentionContext, LinearInput
from aiakq.runtime.layers.attention import Attention, LayerCache
from aiakq.runtime.layers.layer_inputs import GatedInput, LayerInputRows
from aiakq.runtime.layers.mlp import MLP

#: The mean square of a hidden state that is smaller counts as this.
_LEAST_MEAN_SQUARE = 1e-5


class Magnitude:
    """Gives rows the root mean square of others."""

    def __init__(self, width: int, ops: Ops) -> None:
        # As a product, a sum does not depend on the other rows.
        self._sum, self.width = ops.float_dense(torch.ones(1, width)), width

    def mean_square(self, x: Tensor) -> Tensor:
        """x [T, hidden] float32 -> [T, 1]."""
        return self._sum(x * x) / self.width

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        """x [T, hidden] and target [T, 1], a root mean square, -> x with this one, [T, hidden] float32."""
        values = x.float()
        return values * target / torch.sqrt(self.mean_square(values).clamp(min=_LEAST_MEAN_SQUARE))


@dataclass
class StreamsStart:
    """The hidden states of a token: its embedding, and projections of it with the same root mean square.

    projections  to all hidden states but the first, [(n - 1) * hidden, hidden].
    """

    projections: LinearLayer
    magnitude: Magnitude

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, n * hidden]."""
        projected, D = self.projections(x), x.shape[1]
        target = torch.sqrt(self.magnitude.mean_square(x.float()))
        streams = torch.empty(len(x), D + projected.shape[1], dtype=x.dtype, device=x.device)
        streams[:, :D].copy_(x)
        for start in range(0, projected.shape[1], D):
            streams[:, D + start : 2 * D + start].copy_(self.magnitude(projected[:, start : start + D], target))
        return streams


@dataclass
class StreamsNorm:
    """The norm of the mean of the hidden states, of which all but the first are projected to its root mean square.

    projections  of the second hidden state and the following ones.
    """

    projections: Sequence[LinearLayer]
    magnitude: Magnitude
    norm: Norm

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, layout: ActivationLayout | None = None
    ) -> LinearInput:
        """x [T, n * hidden] -> [T, hidden]; see Norm. There is no residual."""
        assert residual is None, "layers with several hidden states add their residuals themselves"
        D = self.magnitude.width
        total = x[:, :D].float()
        target = torch.sqrt(self.magnitude.mean_square(total))
        for number, projection in enumerate(self.projections, 1):
            projected = projection(x[:, number * D : (number + 1) * D])
            total = total + self.magnitude(projected, target).to(x.dtype)
        return self.norm((total / (len(self.projections) + 1)).to(x.dtype), None, layout)


@dataclass
class AltUp:
    """Predicts the hidden states behind a layer, and corrects them by what the layer makes of the active one.

    norm, router  of a hidden state, to n values.
    tanh          tanh(x / hidden) of these.
    predictions   from these to n * n coefficients.
    corrections   from these to n coefficients.
    streams       n.
    width         elements of a hidden state.
    active        the number of the hidden state with which layers compute.
    """

    norm: Norm
    router: LinearLayer
    tanh: Scaling
    predictions: LinearLayer
    corrections: LinearLayer
    streams: int
    width: int
    active: int

    def state(self, x: Tensor) -> Tensor:
        """x [T, n * hidden] -> a view of the active hidden state, [T, hidden]."""
        return x[:, self.active * self.width : (self.active + 1) * self.width]

    def predict(self, x: Tensor) -> Tensor:
        """x [T, n * hidden] -> [T, n * hidden], each hidden state plus a combination of all."""
        n = self.streams
        states = x.float().unflatten(1, (n, -1))
        coefficients = self.predictions(self._modalities(self.state(x))).float().unflatten(1, (n, n))
        total = coefficients[:, :, :1] * states[:, :1]
        for number in range(1, n):
            total += coefficients[:, :, number, None] * states[:, number, None]
        predicted: Tensor = (total + states).flatten(1).to(x.dtype)
        return predicted

    def correct(self, predictions: Tensor, activated: Tensor) -> Tensor:
        """predictions [T, n * hidden] and activated [T, hidden], what the layer made of the active one, ->
        [T, n * hidden].
        """
        factors = self.corrections(self._modalities(activated)).float() + 1
        innovation = activated.float() - self.state(predictions).float()
        states = predictions.float().unflatten(1, (self.streams, -1))
        corrected: Tensor = (innovation[:, None] * factors[:, :, None] + states).flatten(1).to(predictions.dtype)
        return corrected

    def _modalities(self, x: Tensor) -> Tensor:
        return self.tanh(self.router(self.norm(x)))


@dataclass
class Laurel:
    """x + norm(right(left(x))): a low-rank layer beside attention."""

    left: LinearLayer
    right: LinearLayer
    norm: Norm
    add: Scaling

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.add(x, _plain(self.norm(self.right(self.left(x)))))


@dataclass
class StreamsBlock:
    """A layer of tokens with several hidden states, with norms before and after attention and MLP.

    add    a Scaling by one.
    mean   a Scaling by sqrt(1/2).
    start  what makes the hidden states of embeddings [T, hidden], in the first layer; None in others.
    """

    altup: AltUp
    attention_norm: Norm
    laurel: Laurel
    attention: Attention
    after_attention: Norm
    mlp_norm: Norm
    mlp: MLP
    after_mlp: Norm
    add: Scaling
    mean: Scaling
    start: StreamsStart | None = None

    @property
    def elements_per_token(self) -> int:
        """Number of elements of a token that exist at once: five times its hidden states, most of them in float32."""
        return 10 * self.altup.streams * self.altup.width

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: LayerCache, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, n * hidden], or [T, hidden] in the first layer, -> [T, n * hidden], no residual; see DecoderLayer."""
        assert residual is None, "layers with several hidden states add their residuals themselves"
        if self.start is not None:
            x = self.start(x)
        predictions = self.altup.predict(x)
        active = self.altup.state(predictions)
        normed = _plain(self.attention_norm(active))
        attended = _plain(self.after_attention(self.attention(normed, positions, cache, context)))
        both = self.add(self.add(active, attended), self.laurel(normed))
        both = self.mean(both, out=both)
        out = self.mlp(self.mlp_norm(both, None, self.mlp.input_layout(len(both))))
        return self.altup.correct(predictions, self.add(both, _plain(self.after_mlp(out)), out=both)), None


@dataclass
class StreamsEnd:
    """Adds the gated input of a layer to all hidden states but the first; see LayerEnd.

    layer    number of the layer.
    add      a Scaling by one.
    gated    reads the active hidden state.
    factors  by which this is multiplied before, [hidden], or None.
    width    elements of a hidden state.
    active   the number of the active one.
    """

    layer: int
    add: Scaling
    gated: GatedInput
    factors: Tensor | None
    width: int
    active: int

    def __call__(
        self, x: Tensor, residual: Tensor | None, inputs: LayerInputRows | None
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, n * hidden], which is modified."""
        assert inputs is not None, "only the first stage has the inputs of layers"
        D = self.width
        state = x[:, self.active * D : (self.active + 1) * D]
        if self.factors is not None:
            state = (state.float() * self.factors.float()).to(x.dtype)
        added = self.gated(state, inputs, self.layer)
        for start in range(D, x.shape[1], D):
            columns = x[:, start : start + D]
            self.add(columns, added, out=columns)
        return x, residual


def _plain(x: LinearInput) -> Tensor:
    """Narrow the type of a result that was computed without a requested layout."""
    assert isinstance(x, Tensor)
    return x
