"""Mixture-of-experts layer: routing, experts and shared experts (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.experts import GroupedExperts
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import ActivationLayout, LinearInput


class Routing(Protocol):
    """How the router's scores choose experts."""

    @property
    def top_k(self) -> int:
        """Experts of a token."""

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E] float32 -> weights [T, top_k] float32 of a token's experts, and which they are [T, top_k]."""


@dataclass(frozen=True)
class SoftmaxRouting:
    """The largest of the softmax over all experts.

    normalize  whether the weights of a token's experts are scaled to add up to one.
    scale      factor of the weights.
    groups     (groups of experts, how many of them a token's experts may be in): those with the largest share
               (DeepSeek-V2, arXiv:2405.04434).
    """

    top_k: int
    normalize: bool
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        shares = _within_groups(torch.softmax(scores, dim=-1), self.groups, together=1, left_out=0.0)
        shares, chosen = shares.topk(self.top_k, dim=-1)
        return _scaled(shares, self.normalize, self.scale), chosen


@dataclass(frozen=True)
class SigmoidRouting:
    """The largest of sigmoid(score) + correction, weighted by the sigmoid alone (DeepSeek-V3, arXiv:2412.19437).

    sigmoid     the function.
    correction  [E] float32, or None.
    groups      (groups of experts, how many of them a token's experts may be in): those with the largest sum of two.
    normalize, scale  as in SoftmaxRouting.
    """

    top_k: int
    normalize: bool
    scale: float
    sigmoid: Activation
    correction: Tensor | None = None
    groups: tuple[int, int] = (1, 1)

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [T, E]; see Routing."""
        shares = self.sigmoid(scores)
        assert isinstance(shares, Tensor)
        choice = shares if self.correction is None else shares + self.correction
        choice = _within_groups(choice, self.groups, together=2, left_out=float("-inf"))
        chosen = choice.topk(self.top_k, dim=-1).indices
        return _scaled(shares.gather(-1, chosen), self.normalize, self.scale), chosen


def _within_groups(shares: Tensor, groups: tuple[int, int], together: int, left_out: float) -> Tensor:
    """shares [T, E], with ``left_out`` outside the groups whose ``together`` largest add up to most."""
    count, kept = groups
    if kept >= count:
        return shares
    grouped = shares.unflatten(-1, (count, -1))
    best = grouped.topk(together, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
    others = torch.ones(best.shape[:-1] + (count,), dtype=torch.bool, device=best.device).scatter_(-1, best, False)
    return grouped.masked_fill(others.unsqueeze(-1), left_out).flatten(-2)


def _scaled(shares: Tensor, normalize: bool, scale: float) -> Tensor:
    if normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares if scale == 1 else shares * scale


@dataclass
class SparseMLP:
    """The sum of the experts that each token is routed to, weighted by its router.

    A token's result does not depend on the others: its experts are added up in their own order, in float32.

    shared         an expert for every token, or None; weighted by ``sigmoid(shared_gate(x))`` where there is a gate.
    weigh_inputs   whether a token is multiplied by its weight before the expert, not after it (Llama 4).
    """

    router: Callable[[Tensor], Tensor]
    experts: GroupedExperts
    count: int
    routing: Routing
    shared: Callable[[Tensor], Tensor] | None = None
    shared_gate: LinearLayer | None = None
    weigh_inputs: bool = False

    def input_layout(self, m: int) -> ActivationLayout | None:
        """None: rows are sorted by expert first."""
        return None

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, hidden], a Tensor -> [T, hidden]."""
        assert isinstance(x, Tensor)
        shares, chosen = self.routing(self.router(x).float())
        # Tokens sorted by expert, so that one look at the counts says where each expert's begin.
        order = torch.argsort(chosen.flatten(), stable=True)
        own, weights = x[order // self.routing.top_k], shares.flatten()[order].unsqueeze(1)
        if self.weigh_inputs:
            own = (own * weights).to(x.dtype)
        found = self.experts(own, torch.bincount(chosen.flatten(), minlength=self.count).tolist()).float()
        out = self.experts.total(_sums(found if self.weigh_inputs else found * weights, order, len(x)))
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = _sigmoid_by_row(self.shared_gate(x).float()) * shared
            out += shared
        return out.to(x.dtype)


def _sums(found: Tensor, order: Tensor, tokens: int) -> Tensor:
    """found [T * top_k, hidden] float32, of which row i is the result for ``order[i]`` of all chosen experts -> the sum
    of every token's [T, hidden], added up in the order of rows.
    """
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    out = torch.zeros(tokens, found.shape[1], device=found.device)
    for rows in places.view(tokens, -1).sort(dim=1).values.T if tokens else ():
        out += found[rows]
    return out


def _sigmoid_by_row(x: Tensor) -> Tensor:
    """The sigmoid of x [T, 1], as a softmax over (x, 0).

    On a CPU torch computes the last elements of a tensor that do not fill a vector register in another way, so that
    ``torch.sigmoid`` of one number depends on how many others there are. Softmax goes row by row.
    """
    return torch.softmax(F.pad(x, (0, 1)), dim=-1)[:, :1]
