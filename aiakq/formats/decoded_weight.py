"""DecodedWeight: a linear layer in codes that QWeight cannot hold, decoded to floats when it is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.types import QWeight


@dataclass
class DecodedWeight:
    """A linear layer y = x W^T + bias.

    values  [N, K] float, W.
    bias    [N] float or None.
    reason  why it is not computed from its codes, as the end of a sentence.
    """

    values: Tensor
    bias: Tensor | None
    reason: str

    @property
    def n(self) -> int:
        return self.values.shape[0]

    @property
    def k(self) -> int:
        return self.values.shape[1]

    def with_rows(self, rows: Tensor) -> DecodedWeight:
        """Return the weight with rows (outputs) ``rows`` [M] int64, in this order."""
        return DecodedWeight(self.values[rows], None if self.bias is None else self.bias[rows], self.reason)


def as_floats(weight: QWeight | DecodedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight [N, K] as floats."""
    return weight.values.to(dtype) if isinstance(weight, DecodedWeight) else dequantize(weight, dtype)
