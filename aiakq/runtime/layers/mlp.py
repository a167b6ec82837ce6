"""MLPs with and without a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.types import ActivationLayout, LinearInput


class MLP(Protocol):
    """The MLP of a block, dense or sparse."""

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return the preferred layout for M input rows; see LinearLayer."""

    def __call__(self, x: LinearInput) -> Tensor:
        """x [T, hidden], as a Tensor or in the layout ``input_layout(T)`` -> [T, hidden]."""


@dataclass
class GatedMLP:
    """down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202); ``gate_up`` is fused, the gate's outputs first.

    gate_scale  factor of the gate before ``act``, or None.
    """

    gate_up: LinearLayer
    down: LinearLayer
    act: Activation
    gate_scale: Scaling | None = None

    def input_layout(self, m: int) -> ActivationLayout | None:
        """See MLP."""
        return self.gate_up.input_layout(m)

    def __call__(self, x: LinearInput) -> Tensor:
        """See MLP."""
        both = self.gate_up(x)
        if self.gate_scale is not None:
            gate = both[:, : both.shape[1] // 2]
            self.gate_scale(gate, out=gate)
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
