"""Routing of a mixture: which experts a token is sent to, and with which weights. Interface, torch reference and
implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import RoutingProblem


class Routing(Protocol):
    """Selection of experts from the router's scores. A token's result does not depend on the other tokens.

    A class of a family's own may have the kind "", which no kernel knows: then torch computes what it says.
    """

    @property
    def kind(self) -> str:
        """The rule: softmax, sigmoid, top_sigmoid or sparse_mixer."""

    @property
    def top_k(self) -> int:
        """Number of experts A per token."""

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Map scores [T, E] to the weights [T, A] float32 and expert indices [T, A] int64; computed in float32."""


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
    kind: ClassVar[str] = "softmax"

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        weights = _mask_groups(torch.softmax(scores.float(), dim=-1), self.groups, top=1, fill=0.0)
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
    kind: ClassVar[str] = "sigmoid"

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        weights = self.sigmoid(scores.float())
        assert isinstance(weights, Tensor)
        biased = weights if self.correction is None else weights + self.correction
        biased = _mask_groups(biased, self.groups, top=2, fill=float("-inf"))
        selected = biased.topk(self.top_k, dim=-1).indices
        return _scaled(weights.gather(-1, selected), self.normalize, self.scale, self.epsilon), selected


@dataclass(frozen=True)
class TopSigmoidRouting:
    """Top-k of the scores, weighted by their sigmoid (Llama 4)."""

    top_k: int
    sigmoid: Activation
    kind: ClassVar[str] = "top_sigmoid"

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        shares, chosen = scores.float().topk(self.top_k, dim=-1)
        weights = self.sigmoid(shares.contiguous())
        assert isinstance(weights, Tensor)
        return weights, chosen


@dataclass(frozen=True)
class SparseMixerRouting:
    """The best expert, then the best of the others, each weighted by a softmax over the scores close to its own
    (Phi-3.5-MoE).

    jitter  scores are excluded if their relative distance from the best one exceeds twice this value.
    """

    jitter: float
    top_k: int = 2
    kind: ClassVar[str] = "sparse_mixer"

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        scores = scores.float()
        left, shares, chosen = scores, [], []
        for _ in range(self.top_k):
            best, number = left.max(dim=-1, keepdim=True)
            far = (best - scores) / scores.abs().clamp(min=best) > 2 * self.jitter
            shares.append(torch.softmax(left.masked_fill(far, float("-inf")), dim=-1).gather(-1, number))
            chosen.append(number)
            left = left.scatter(-1, number, float("-inf"))
        return torch.cat(shares, dim=-1), torch.cat(chosen, dim=-1)


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


#: scores [T, E] -> weights [T, A] float32 and expert indices [T, A] int64; see Routing.
Router: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class BoundRouting:
    """A routing and the implementation that computes it."""

    routing: Routing
    router: Router

    @property
    def top_k(self) -> int:
        """See Routing."""
        return self.routing.top_k

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        return self.router(scores)


class RoutingKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, routing: Routing, problem: RoutingProblem) -> Router:
        """Bind the routing of one layer."""


IMPLEMENTATIONS = Implementations[RoutingKernel].of_backends("routing", "cpu")


def prepare(routing: Routing, problem: RoutingProblem) -> Router:
    """Return the reference, which is the routing itself."""
    return routing
