"""Normalization, computed in float32 whatever the activations are, by the kernels of the device where it has some."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels import triton
from aiakq.kernels.cpu import rows
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.triton import rows as triton_layers
from aiakq.kernels.types import Rows, Wish


@dataclass
class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    weight: Tensor
    eps: float
    _native: rows.NativeNorm | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self, x: Tensor, residual: Tensor | None = None, wish: Wish = None) -> Rows:
        """x [..., D] -> [..., D]; ``residual`` is added to x, in place, first.

        The result is as whoever takes it wishes, if the kernel can.
        """
        if x.is_cpu and x.dtype in TYPES and rows.available():
            if self._native is None:
                self._native = rows.NativeNorm(self.weight, None, self.eps, centered=False)
            return self._native(x, residual)
        if triton.usable(x) and x.dim() == 2:
            return triton_layers.norm(x, self.weight, None, self.eps, residual, wish=wish)
        if residual is not None:
            x += residual
        values = x.to(torch.float32)
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * values.to(x.dtype)


@dataclass
class LayerNorm:
    """Mean and variance normalization over the last dimension, with weight and bias."""

    weight: Tensor
    bias: Tensor
    eps: float
    _native: rows.NativeNorm | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self, x: Tensor, residual: Tensor | None = None, wish: Wish = None) -> Rows:
        """x [..., D] -> [..., D]; ``residual`` and ``wish`` as for RMSNorm."""
        if x.is_cpu and x.dtype in TYPES and rows.available():
            if self._native is None:
                self._native = rows.NativeNorm(self.weight, self.bias, self.eps, centered=True)
            return self._native(x, residual)
        if triton.usable(x) and x.dim() == 2:
            return triton_layers.norm(x, self.weight, self.bias, self.eps, residual, True, wish)
        if residual is not None:
            x += residual
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


AnyNorm = RMSNorm | LayerNorm
