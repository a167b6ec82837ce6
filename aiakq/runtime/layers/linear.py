"""ConcatLinear: linear layers with the same input, their outputs concatenated. Single ones are bound by the device's
Ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import LinearInput


class ConcatLinear(LinearLayer):
    """Linear layers with the same input, their outputs one after the other: those whose weights cannot be one."""

    def __init__(self, parts: Sequence[LinearLayer]) -> None:
        self.parts = parts

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, sum of N]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)
