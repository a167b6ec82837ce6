"""The experts of a mixture, each applied to its own rows: interface, torch reference and implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import ExpertsProblem


@dataclass(frozen=True)
class ExpertLayers:
    """Gated MLPs of equal sizes (Shazeer 2020, arXiv:2002.05202): second(act(gate) * up), [gate, up] = first(x).

    row_multiple  multiple to which the layers need the number of rows padded; see ops/linear.py.
    """

    first: Sequence[LinearLayer]
    second: Sequence[LinearLayer]
    act: Activation
    row_multiple: int


class GroupedExperts(Protocol):
    """A group of experts. A row's result does not depend on the other rows."""

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [S, K], rows grouped by expert, ``counts`` [E] rows each -> [S, N]."""

    def total(self, sums: Tensor) -> Tensor:
        """Reduce ``sums`` [T, N] float32 of rows returned by ``__call__`` over the ranks. The identity, unless experts
        are distributed so that each rank's rows are partial results or zeros.
        """
        return sums


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
                outputs.append(second(layers.act.gated(both, second.input_layout(len(both))))[: len(rows)])
        return torch.cat(outputs) if outputs else torch.empty_like(x)


class ExpertsKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, layers: ExpertLayers, problem: ExpertsProblem) -> GroupedExperts:
        """Bind the operation of one layer."""


IMPLEMENTATIONS = Implementations[ExpertsKernel].of_backends("experts", "cpu")


def prepare(layers: ExpertLayers, problem: ExpertsProblem) -> TorchExperts:
    """Return the reference; ``layers`` may come from any implementation."""
    return TorchExperts(layers)
