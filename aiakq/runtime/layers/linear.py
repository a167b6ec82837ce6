"""Linear layers of the runtime: dense, or quantized through whichever kernel is bound to them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels import BoundLinear

#: Token rows, logit rows and the rows of each expert are padded to a multiple of this. On a CPU, BLAS sums in another
#: order for fewer than four rows; with the padding a row's result does not depend on how many others there are
#: (docs/decisions/0003).
ROW_MULTIPLE = 4


@dataclass
class Linear:
    """y = x W^T + b with W [N, K] in the activation dtype."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return F.linear(x, self.weight, self.bias)


@dataclass
class QLinear:
    """A quantized weight bound to a kernel; the same call as Linear."""

    bound: BoundLinear

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        if x.dim() == 2:
            return self.bound(x)
        return self.bound(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


AnyLinear = Linear | QLinear
