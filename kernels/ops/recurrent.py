"""RecurrentOps: how ``Ops`` binds the operations of recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.ops import convolution, gated_norm, recurrence, selective_scan
from aiakq.kernels.ops.convolution import Convolution
from aiakq.kernels.ops.gated_norm import GatedNorm
from aiakq.kernels.ops.recurrence import Recurrence
from aiakq.kernels.ops.selective_scan import SelectiveScan
from aiakq.kernels.recurrent_types import ConvolutionSpec, GatedNormProblem, RecurrenceSpec, SelectiveScanSpec
from aiakq.kernels.selection import Implementations, Kernel, KernelProblem

#: See REGISTRIES in kernels/ops/__init__.py.
RECURRENT: dict[str, Implementations[Any]] = {
    "convolution": convolution.IMPLEMENTATIONS,
    "recurrence": recurrence.IMPLEMENTATIONS,
    "selective_scan": selective_scan.IMPLEMENTATIONS,
    "gated_norm": gated_norm.IMPLEMENTATIONS,
}


class RecurrentOps:
    """The part of ``Ops`` that only recurrent layers need."""

    dtype: torch.dtype
    device_type: str

    def _bind(
        self, implementations: Implementations[Kernel], problem: KernelProblem, kind: str = "", count: int = 1
    ) -> Kernel:
        raise NotImplementedError

    def convolution(self, spec: ConvolutionSpec) -> Convolution:
        """Bind the causal convolution of one layer."""
        problem = spec.problem(self.dtype, self.device_type)
        return self._bind(convolution.IMPLEMENTATIONS, problem).prepare(spec, problem)

    def recurrence(self, spec: RecurrenceSpec) -> Recurrence:
        """Bind the linear recurrence of one layer."""
        problem = spec.problem(self.dtype, self.device_type)
        return self._bind(recurrence.IMPLEMENTATIONS, problem).prepare(spec, problem)

    def selective_scan(self, spec: SelectiveScanSpec) -> SelectiveScan:
        """Bind the selective scan of one layer."""
        problem = spec.problem(self.dtype, self.device_type)
        return self._bind(selective_scan.IMPLEMENTATIONS, problem).prepare(spec, problem)

    def gated_norm(
        self, weight: Tensor, group: int, epsilon: float, *, gate_first: bool, sigmoid: bool = False
    ) -> GatedNorm:
        """Bind an RMS norm over groups of ``group`` columns with ``weight`` [D] and a gate before or after it: silu, or
        ``sigmoid``.
        """
        problem = GatedNormProblem(weight.shape[0], group, gate_first, self.dtype, self.device_type, sigmoid)
        return self._bind(gated_norm.IMPLEMENTATIONS, problem).prepare(weight, epsilon, problem)
