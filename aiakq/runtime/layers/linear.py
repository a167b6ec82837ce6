"""ConcatLinear: linear layers with the same input, whose outputs are concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import LinearInput


class ConcatLinear(LinearLayer):
    """Linear layers with the same input and concatenated outputs, for weights that cannot be fused into one."""

    def __init__(self, parts: Sequence[LinearLayer]) -> None:
        self.parts = parts
        self.has_local_outputs = all(part.has_local_outputs for part in parts)

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, sum of N]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)
