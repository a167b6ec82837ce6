"""RecurrentOps: how ``Ops`` binds the operations of recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.ops import convolution, gated_norm, recurrence
from aiakq.kernels.ops.convolution import Convolution
from aiakq.kernels.ops.gated_norm import GatedNorm
from aiakq.kernels.ops.recurrence import Recurrence
from aiakq.kernels.recurrent_types import ConvolutionSpec, GatedNormProblem, RecurrenceSpec
from aiakq.kernels.registry import Registry

#: See REGISTRIES in kernels/ops/__init__.py.
RECURRENT: dict[str, Registry] = {
    "convolution": convolution.IMPLEMENTATIONS,
    "recurrence": recurrence.IMPLEMENTATIONS,
    "gated_norm": gated_norm.IMPLEMENTATIONS,
}


class RecurrentOps:
    """The part of ``Ops`` that only recurrent layers need."""

    dtype: torch.dtype
    device_type: str

    def _bind(self, operation: str, problem: object, kind: str = "", count: int = 1) -> object:
        raise NotImplementedError

    def convolution(self, spec: ConvolutionSpec) -> Convolution:
        """Bind the causal convolution of one layer."""
        problem = spec.problem(self.dtype, self.device_type)
        layer: Convolution = self._bind("convolution", problem).prepare(spec, problem)
        return layer

    def recurrence(self, spec: RecurrenceSpec) -> Recurrence:
        """Bind the linear recurrence of one layer."""
        problem = spec.problem(self.dtype, self.device_type)
        layer: Recurrence = self._bind("recurrence", problem).prepare(spec, problem)
        return layer

    def gated_norm(self, weight: Tensor, group: int, epsilon: float, *, gate_first: bool) -> GatedNorm:
        """Bind an RMS norm over groups of ``group`` columns with ``weight`` [D] and a silu gate before or after it."""
        problem = GatedNormProblem(weight.shape[0], group, gate_first, self.dtype, self.device_type)
        layer: GatedNorm = self._bind("gated_norm", problem).prepare(weight, epsilon, problem)
        return layer
