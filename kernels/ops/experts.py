"""The experts of a mixture, each on rows of its own: interface, torch reference and implementations.

An implementation is a module with

    supports(problem: ExpertsProblem) -> None, or one sentence why not
    prepare(layers: ExpertLayers, problem: ExpertsProblem) -> GroupedExperts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.registry import Registry
from aiakq.kernels.types import ExpertsProblem

IMPLEMENTATIONS = Registry(
    "aiakq.implementations.experts",
    {"cpu": "aiakq.kernels.cpu.experts", "torch": "aiakq.kernels.ops.experts"},
    plugins_first=True,
)


@dataclass(frozen=True)
class ExpertLayers:
    """Gated MLPs of the same sizes (Shazeer 2020, arXiv:2002.05202): second(act(gate) * up), [gate, up] = first(x).

    row_multiple  rows that the layers are given come in multiples of this; see ops/linear.py.
    """

    first: Sequence[LinearLayer]
    second: Sequence[LinearLayer]
    act: Activation
    row_multiple: int


class GroupedExperts(Protocol):
    """Experts side by side. A row's result does not depend on the other rows."""

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [S, K], the rows of one expert after those of another, ``counts`` [E] of each -> [S, N]."""

    def total(self, sums: Tensor) -> Tensor:
        """What is called for sums [T, N] float32 of rows that ``__call__`` returned: the same, where those are all
        there is. Experts of ranks may return parts, or zeros, whose sums have to be added up over the ranks.
        """
        return sums


class TorchExperts(GroupedExperts):
    """One after the other; those without rows do not run."""

    def __init__(self, layers: ExpertLayers) -> None:
        self.layers = layers

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [S, K] -> [S, N]; see GroupedExperts."""
        found, layers = [], self.layers
        for own, first, second in zip(x.split(list(counts)), layers.first, layers.second, strict=True):
            if len(own):
                both = first(F.pad(own, (0, 0, 0, -len(own) % layers.row_multiple)))
                found.append(second(layers.act.gated(both, second.input_layout(len(both))))[: len(own)])
        return torch.cat(found) if found else torch.empty_like(x)


def supports(problem: ExpertsProblem) -> str | None:
    """None: the reference supports every problem."""
    return None


def prepare(layers: ExpertLayers, problem: ExpertsProblem) -> TorchExperts:
    """The layers may be those of any implementation."""
    return TorchExperts(layers)
