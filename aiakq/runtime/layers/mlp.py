"""MLPs with and without a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import ActivationLayout, LinearInput


class MLP(Protocol):
    """The MLP of a block, dense or sparse."""

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return the preferred layout for M input rows; see LinearLayer."""

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, hidden], as a Tensor or in the layout ``input_layout(T)`` -> [T, hidden]."""


class GateStep(Protocol):
    """What changes the gate of an MLP before its activation function: a Scaling, or a GaussianTopK."""

    def __call__(self, x: Tensor, *, out: Tensor) -> Tensor:
        """x [T, I] -> out [T, I], which may be x."""


class GaussianTopK:
    """relu(x - cutoff), with a cutoff below which a share of a row would lie if it were normally distributed (Spark
    transformer; You et al. 2025, arXiv:2506.06644).

    share  from 0 to below 1.
    width  elements of a row, I.
    """

    def __init__(self, share: float, width: int, ops: Ops) -> None:
        quantile = torch.erfinv(2 * torch.tensor(share, dtype=torch.float32) - 1) * 2**0.5
        self._deviations = float(quantile.to(ops.dtype))
        # As a product, a sum does not depend on the other rows.
        self._sum, self._width = ops.float_dense(torch.ones(1, width)), width

    def __call__(self, x: Tensor, *, out: Tensor) -> Tensor:
        """x [T, I] -> out [T, I]; see GateStep."""
        values = x.to(torch.float32, copy=True)
        values -= self._sum(values) / self._width
        deviation = torch.sqrt(self._sum(values * values) / self._width)
        values -= deviation * self._deviations
        return out.copy_(values.relu_())


@dataclass
class GatedMLP:
    """down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202); ``gate_up`` is fused, the gate's outputs first.

    gate_step  what changes the gate before ``act``, or None.
    """

    gate_up: LinearLayer
    down: LinearLayer
    act: Activation
    gate_step: GateStep | None = None

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See MLP."""
        return self.gate_up.input_layout(m)

    def __call__(self, x: LinearInput) -> Tensor:
        """See MLP."""
        both = self.gate_up(x)
        if self.gate_step is not None:
            gate = both[:, : both.shape[1] // 2]
            self.gate_step(gate, out=gate)
        return self.down(self.act.gated(both, self.down.input_layout(len(both))))


@dataclass
class PlainMLP:
    """second(act(first(x)))."""

    first: LinearLayer
    second: LinearLayer
    act: Activation

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See MLP."""
        return self.first.input_layout(m)

    def __call__(self, x: LinearInput) -> Tensor:
        """See MLP."""
        first = self.first(x)
        return self.second(self.act(first, self.second.input_layout(len(first))))
