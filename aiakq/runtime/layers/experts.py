"""Mixture-of-experts layer: routing, experts and shared experts (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.experts import GroupedExperts, Routed
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import ActivationLayout, LinearInput


class Routing(Protocol):
    """Selection of experts from the router's scores."""

    @property
    def top_k(self) -> int:
        """Number of experts per token."""

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Map scores [T, E] float32 to the weights [T, top_k] float32 and expert indices [T, top_k] int64."""


@dataclass(frozen=True)
class SoftmaxRouting:
    """Top-k of the softmax over all experts.

    normalize  whether the weights of a token's experts are normalized to sum to one.
    scale      factor on the weights.
    groups     (number of expert groups, number of groups that a token's experts may be in): the groups with the largest
               maximum (DeepSeek-V2, arXiv:2405.04434).
    correction    bias [E] float32 on the selection, or None (ERNIE 4.5).
    smallest_sum  lower bound of the sum by which weights are normalized.
    """

    top_k: int
    normalize: bool
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    correction: Tensor | None = None
    smallest_sum: float = 0.0

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        weights = _mask_groups(torch.softmax(scores, dim=-1), self.groups, top=1, fill=0.0)
        if self.correction is None:
            weights, selected = weights.topk(self.top_k, dim=-1)
        else:
            selected = (weights + self.correction).topk(self.top_k, dim=-1).indices
            weights = weights.gather(-1, selected)
        return _scaled(weights, self.normalize, self.scale, smallest_sum=self.smallest_sum), selected


@dataclass(frozen=True)
class SigmoidRouting:
    """Top-k of sigmoid(score) + correction, weighted by the sigmoid alone (DeepSeek-V3, arXiv:2412.19437).

    sigmoid     the sigmoid function.
    correction  bias [E] float32 on the selection, or None.
    groups      (number of expert groups, number of groups that a token's experts may be in): the groups with the
                largest sum of their top two.
    normalize, scale  as in SoftmaxRouting.
    epsilon     added to the sum by which weights are normalized.
    """

    top_k: int
    normalize: bool
    scale: float
    sigmoid: Activation
    correction: Tensor | None = None
    groups: tuple[int, int] = (1, 1)
    epsilon: float = 0.0

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        weights = self.sigmoid(scores)
        assert isinstance(weights, Tensor)
        biased = weights if self.correction is None else weights + self.correction
        biased = _mask_groups(biased, self.groups, top=2, fill=float("-inf"))
        selected = biased.topk(self.top_k, dim=-1).indices
        return _scaled(weights.gather(-1, selected), self.normalize, self.scale, self.epsilon), selected


def _mask_groups(weights: Tensor, groups: tuple[int, int], top: int, fill: float) -> Tensor:
    """Return weights [T, E], with ``fill`` outside the groups whose ``top`` largest weights have the largest sums."""
    count, kept = groups
    if kept >= count:
        return weights
    grouped: Tensor = weights.unflatten(-1, (count, -1))
    best = grouped.topk(top, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
    mask = torch.ones(best.shape[:-1] + (count,), dtype=torch.bool, device=best.device).scatter_(-1, best, False)
    return grouped.masked_fill(mask.unsqueeze(-1), fill).flatten(-2)


def _scaled(weights: Tensor, normalize: bool, scale: float, epsilon: float = 0.0, smallest_sum: float = 0.0) -> Tensor:
    if normalize:
        total = weights.sum(-1, keepdim=True).clamp(min=smallest_sum)
        weights = weights / (total + epsilon if epsilon else total)
    return weights if scale == 1 else weights * scale


@dataclass
class SparseMLP:
    """Weighted sum of the experts that each token is routed to.

    The result of a token does not depend on other tokens: its experts are summed in a fixed order, in float32.

    count         number of experts.
    shared        shared expert, which every token uses, or None.
    shared_gate   gate of the shared expert, which is weighted by ``sigmoid(shared_gate(x))``; None for no weight.
    weigh_inputs  whether the weight is applied to the input of an expert instead of its output (Llama 4).
    width         intermediate size of an expert.
    hidden        size of its inputs and outputs.
    """

    router: Callable[[Tensor], Tensor]
    experts: GroupedExperts
    count: int
    routing: Routing
    shared: Callable[[Tensor], Tensor] | None = None
    shared_gate: LinearLayer | None = None
    weigh_inputs: bool = False
    width: int = 0
    hidden: int = 0

    @property
    def elements_per_token(self) -> int:
        """Number of activations per token that exist at once, beside its input: inputs and outputs of its experts, the
        gate and up projections, and their product.
        """
        return self.routing.top_k * (3 * self.width + 2 * self.hidden)

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return None, since rows are sorted by expert first."""
        return None

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, hidden], a Tensor -> [T, hidden]."""
        assert isinstance(x, Tensor)
        weights, selected = self.routing(self.router(x).float())
        out = self.experts.mixture(x, Routed(selected, weights, self.count, self.weigh_inputs))
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = _sigmoid_by_row(self.shared_gate(x).float()) * shared
            out += shared
        return out.to(x.dtype)


def _sigmoid_by_row(x: Tensor) -> Tensor:
    """Return the sigmoid of x [T, 1], computed as a softmax over (x, 0).

    On a CPU, ``torch.sigmoid`` computes the last elements that do not fill a vector register with different code, so
    that its result for one element depends on the number of elements. Softmax is computed row by row.
    """
    return torch.softmax(F.pad(x, (0, 1)), dim=-1)[:, :1]
