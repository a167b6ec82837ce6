"""Linear layers of the runtime: dense, or quantized through whichever kernel is bound to them; and the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels import BoundLinear
from aiakq.kernels.cpu.dense import NativeDense
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.cpu.rows import NativeEmbedding, NativeSelection, available
from aiakq.kernels.types import Rows, Wish

#: Where a product is torch's, token rows, logit rows and the rows of each expert are padded to a multiple of this. On a
#: CPU, BLAS sums in another order for fewer than four rows; with the padding a row's result does not depend on how many
#: others there are (docs/decisions/0003). Native kernels need none.
ROW_MULTIPLE = 4


@dataclass
class Linear:
    """y = x W^T + b with W [N, K] in the activation dtype, by torch."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return F.linear(x, self.weight, self.bias)


@dataclass
class QLinear:
    """A quantized weight bound to a kernel; the same call as Linear."""

    bound: BoundLinear

    def __call__(self, x: Rows) -> Tensor:
        """x [..., K] -> [..., N]."""
        if not isinstance(x, Tensor) or x.dim() == 2:
            return self.bound(x)
        return self.bound(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


@dataclass
class SideBySide:
    """Several linears with the same input as one, their outputs one after the other; for those that cannot be fused."""

    parts: Sequence[Linear | QLinear | NativeDense]

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., sum of N]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


AnyLinear: TypeAlias = Linear | QLinear | NativeDense | SideBySide


def wish_of(linear: AnyLinear, m: int) -> Wish:
    """How ``m`` rows for ``linear`` had better be made by what computes them."""
    return linear.bound.wish(m) if isinstance(linear, QLinear) else None


@dataclass
class Embedding:
    """Rows of a table [V, D], in the activation dtype; the table may be the tiles of a head that is tied to it."""

    table: Tensor | NativeDense
    dtype: torch.dtype
    _native: NativeEmbedding | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, D]."""
        if self._native is None:
            if isinstance(self.table, NativeDense):
                n, k = self.table.op.n, self.table.op.k
                self._native = NativeEmbedding(self.table.tiles, n, k, True, self.dtype)
            elif self.table.is_cpu and {self.table.dtype, self.dtype} <= TYPES.keys() and available():
                n, k = self.table.shape
                self._native = NativeEmbedding(self.table, n, k, False, self.dtype)
            else:
                return F.embedding(ids, self.table).to(self.dtype)
        return self._native(ids)


def selected(x: Tensor, numbers: Tensor) -> Tensor:
    """Rows ``numbers`` [R] int64 of x [T, D] -> [R, D]."""
    if x.is_cpu and x.dtype in TYPES and available():
        return NativeSelection()(x, numbers)
    return x[numbers]
