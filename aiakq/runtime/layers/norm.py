"""Normalization, computed in float32 whatever the activations are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        values = x.to(torch.float32)
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * values.to(x.dtype)


@dataclass
class LayerNorm:
    """Mean and variance normalization over the last dimension, with weight and bias."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


AnyNorm = RMSNorm | LayerNorm
