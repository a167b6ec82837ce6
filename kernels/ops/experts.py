"""The experts of a mixture, each applied to its own rows: interface, torch reference and implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import ActivationLayout, ExpertsProblem, LinearInput, PreparedActivation


@dataclass(frozen=True)
class ExpertLayers:
    """MLPs of equal sizes: second(act(gate) * up), [gate, up] = first(x) (Shazeer 2020, arXiv:2002.05202), or
    second(act(first(x))).

    row_multiple  multiple to which the layers need the number of rows padded; see ops/linear.py.
    start         number of the first of these experts in the mixture, of which a rank may have only some.
    gated         whether ``first`` computes gates before its other outputs.
    """

    first: Sequence[LinearLayer]
    second: Sequence[LinearLayer]
    act: Activation
    row_multiple: int
    start: int = 0
    gated: bool = True

    def activated(self, x: Tensor, layout: ActivationLayout | None = None) -> LinearInput:
        """Return the input of ``second`` for the output x [S, N] of ``first``: [S, N / 2], or [S, N] without gates."""
        return self.act.gated(x, layout) if self.gated else self.act(x, layout)


@dataclass(frozen=True)
class Routed:
    """The experts that T tokens are routed to, A each: T * A pairs of a token and an expert.

    selected      [T, A] int64, numbers of experts.
    weights       [T, A] float32.
    count         number of experts E of the mixture.
    weigh_inputs  whether the weight is applied to the input of an expert instead of its output (Llama 4).
    """

    selected: Tensor
    weights: Tensor
    count: int
    weigh_inputs: bool = False


class GroupedExperts(Protocol):
    """A group of experts. A row's result does not depend on the other rows.

    sigmoid  of the gates of shared experts, in float32; None for PyTorch's, row by row.
    """

    sigmoid: Activation | None = None

    @property
    def host_reason(self) -> str | None:
        """Why the host reads the number of rows of each expert, so that no CUDA graph can hold the layer; or None."""
        return "experts run one after the other"

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [S, K], rows grouped by expert, ``counts`` [E] rows each -> [S, N]."""

    def total(self, sums: Tensor) -> Tensor:
        """Reduce ``sums`` [T, N] float32 of rows returned by ``__call__`` over the ranks. The identity, unless experts
        are distributed so that each rank's rows are partial results or zeros.
        """
        return sums

    def mixture(self, x: Tensor, routed: Routed) -> Tensor:
        """Return the weighted sum of the outputs of every token's experts, in ascending order of experts:
        x [T, K] -> [T, N] float32.
        """
        rows, weights, order, counts = grouped_rows(x, routed)
        outputs = self(rows, counts).float()
        return self.total(_sums(outputs if routed.weigh_inputs else outputs * weights, order, len(x)))

    def output(self, x: Tensor, routed: Routed, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """Return ``mixture`` plus the output ``shared`` [T, N] of shared experts, which are weighted by the sigmoid of
        ``gate`` [T, 1] if there is one: x [T, K] -> [T, N] in the dtype of x, to which only the result is rounded.
        """
        out = self.mixture(x, routed)
        if shared is not None:
            factor = 1 if gate is None else (self.sigmoid or _sigmoid_by_row)(gate.float())
            assert not isinstance(factor, PreparedActivation)
            out += factor * shared
        return out.to(x.dtype)


@runtime_checkable
class PairExperts(Protocol):
    """A group of experts that computes all pairs of a step at once, in tensors whose shapes depend on T alone."""

    def outputs(self, x: Tensor, routed: Routed, zeros: bool) -> Tensor:
        """x [T, K] -> [T * A, N], one row per pair. Rows of other ranks' experts are zero or, without ``zeros``,
        undefined.
        """

    def weighted_sums(self, outputs: Tensor, routed: Routed, own: bool) -> Tensor:
        """Sum the outputs [T * A, N] of every token as ``mixture`` does, with ``own`` those of this group's experts
        alone -> [T, N] float32.
        """


def grouped_rows(x: Tensor, routed: Routed) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Sort the pairs by expert, and read on the host how many each has.

    x [T, K] -> the inputs [T * A, K] and weights [T * A, 1] of the sorted pairs, the pair ``order`` [T * A] int64 of
    each, and the number of pairs of each expert.
    """
    order = torch.argsort(routed.selected.flatten(), stable=True)
    rows, weights = x[order // routed.selected.shape[1]], routed.weights.flatten()[order].unsqueeze(1)
    if routed.weigh_inputs:
        rows = (rows * weights).to(x.dtype)
    return rows, weights, order, torch.bincount(routed.selected.flatten(), minlength=routed.count).tolist()


def _sums(outputs: Tensor, order: Tensor, tokens: int) -> Tensor:
    """Sum the expert outputs of every token, [T * A, hidden] float32 -> [T, hidden] float32.

    order  [T * A] int64: row i of ``outputs`` belongs to pair ``order[i]``. Rows are summed in ascending order.
    """
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    out = torch.zeros(tokens, outputs.shape[1], device=outputs.device)
    for rows in inverse.view(tokens, -1).sort(dim=1).values.T if tokens else ():
        out += outputs[rows]
    return out


def _sigmoid_by_row(x: Tensor) -> Tensor:
    """Return the sigmoid of x [T, 1], computed as a softmax over (x, 0).

    On a CPU, ``torch.sigmoid`` computes the last elements that do not fill a vector register with different code, so
    that its result for one element depends on the number of elements. Softmax is computed row by row.
    """
    return torch.softmax(F.pad(x, (0, 1)), dim=-1)[:, :1]


class TorchExperts(GroupedExperts):
    """The reference: experts run one after the other; those without rows are skipped."""

    def __init__(self, layers: ExpertLayers) -> None:
        self.layers = layers

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [S, K] -> [S, N]; see GroupedExperts."""
        outputs, layers = [], self.layers
        for rows, first, second in zip(x.split(list(counts)), layers.first, layers.second, strict=True):
            if len(rows):
                both = first(F.pad(rows, (0, 0, 0, -len(rows) % layers.row_multiple)))
                outputs.append(second(layers.activated(both, second.input_layout(len(both))))[: len(rows)])
        return torch.cat(outputs) if outputs else torch.empty_like(x)


class ExpertsKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, layers: ExpertLayers, problem: ExpertsProblem) -> GroupedExperts:
        """Bind the operation of one layer."""


IMPLEMENTATIONS = Implementations[ExpertsKernel].of_backends("experts", "cpu", "triton")


def prepare(layers: ExpertLayers, problem: ExpertsProblem) -> TorchExperts:
    """Return the reference; ``layers`` may come from any implementation."""
    return TorchExperts(layers)
