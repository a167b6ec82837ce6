"""SelfGatedNorm: a norm whose result is multiplied by gates that a small MLP computes from it (A.X K2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.ops.activation import Activation
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.scaling import Scaling
from aiakq.kernels.types import ActivationLayout, LinearInput


@dataclass
class SelfGatedNorm:
    """y * sigmoid(up(silu(down(y)))), with y = norm(x).

    down, up  from the width of the norm to a small one, and back.
    copy      a Scaling by one.
    """

    norm: Norm
    down: LinearLayer
    up: LinearLayer
    silu: Activation
    sigmoid: Activation
    copy: Scaling

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, layout: ActivationLayout | None = None
    ) -> LinearInput:
        """x [T, D] -> [T, D]; see Norm."""
        normed = self.norm(x, residual)
        assert isinstance(normed, Tensor)
        gates = self.up(self.silu(self.down(normed)))
        both = torch.empty(len(x), 2 * gates.shape[1], dtype=x.dtype, device=x.device)
        self.copy(gates, out=both[:, : gates.shape[1]])
        self.copy(normed, out=both[:, gates.shape[1] :])
        return self.sigmoid.gated(both, layout)
