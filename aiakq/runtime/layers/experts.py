"""The mixture of experts: a router sends each token to a few of many MLPs (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.linear import ROW_MULTIPLE, LinearLayer
from aiakq.kernels.types import ActivationLayout, LinearInput


@dataclass
class SparseMLP:
    """The sum of the ``top_k`` experts that each token is routed to, weighted by the router's softmax.

    A token's result does not depend on the others: every expert's rows are padded like all rows are, and a token's
    experts are added up in their own order, in float32.

    normalize    whether the weights of a token's experts are scaled to add up to one.
    shared       an expert for every token, or None; weighted by ``sigmoid(shared_gate(x))`` where there is a gate.
    """

    router: LinearLayer
    experts: Sequence[Callable[[Tensor], Tensor]]
    top_k: int
    normalize: bool
    shared: Callable[[Tensor], Tensor] | None = None
    shared_gate: LinearLayer | None = None

    def input_layout(self, m: int) -> ActivationLayout | None:
        """None: rows are sorted by expert first."""
        return None

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, hidden], a Tensor -> [T, hidden]."""
        assert isinstance(x, Tensor)
        shares, chosen = torch.softmax(self.router(x).float(), dim=-1).topk(self.top_k, dim=-1)
        if self.normalize:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        # Tokens sorted by expert, so that one look at the counts says where each expert's begin.
        order = torch.argsort(chosen.flatten(), stable=True)
        tokens, by_expert = order // self.top_k, shares.flatten()[order].unsqueeze(1)
        start = 0
        for expert, count in zip(self.experts, self._counts(chosen), strict=True):
            if count:
                rows = tokens[start : start + count]
                padded = F.pad(x[rows], (0, 0, 0, -count % ROW_MULTIPLE))
                out.index_add_(0, rows, expert(padded)[:count].float() * by_expert[start : start + count])
            start += count
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = _sigmoid_by_row(self.shared_gate(x).float()) * shared
            out += shared
        return out.to(x.dtype)

    def _counts(self, chosen: Tensor) -> list[int]:
        """How many tokens each expert gets."""
        return torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()


def _sigmoid_by_row(x: Tensor) -> Tensor:
    """The sigmoid of x [T, 1], as a softmax over (x, 0).

    On a CPU torch computes the last elements of a tensor that do not fill a vector register in another way, so that
    ``torch.sigmoid`` of one number depends on how many others there are. Softmax goes row by row.
    """
    return torch.softmax(F.pad(x, (0, 1)), dim=-1)[:, :1]
