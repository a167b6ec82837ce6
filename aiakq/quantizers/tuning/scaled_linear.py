"""ScaledLinear: a quantized linear whose scales have a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aiakq.kernels.types import QWeight


class ScaledLinear(nn.Module):
    """A linear with fixed codes [N, K] uint8, of which one byte per weight is in memory.

    factor  what the scales [N, K / G] are multiplied by, the parameter to be tuned.
    """

    def __init__(self, weight: QWeight, device: torch.device) -> None:
        super().__init__()
        assert weight.perm is None and weight.scheme.endswith("a16"), "such weights are not made here"
        self.in_features, self.out_features = weight.k, weight.n
        self.group_size = weight.group_size
        zeros = torch.full_like(weight.scales, 2 ** (weight.bits - 1)) if weight.zeros is None else weight.zeros
        self.register_buffer("codes", weight.codes.to(device))
        self.register_buffer("scales", weight.scales.to(device, torch.float32))
        self.register_buffer("zeros", zeros.to(device, torch.float32))
        bias = None if weight.bias is None else weight.bias.to(device, torch.float32)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.factor = nn.Parameter(torch.ones_like(self.get_buffer("scales")))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] float32."""
        codes, zeros = self.get_buffer("codes"), self.get_buffer("zeros")
        y: Tensor = _Product.apply(x, codes, zeros, self.tuned(), self.group_size)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias

    def tuned(self) -> Tensor:
        """Return the scales times their factors, [N, K / G] float32."""
        return self.get_buffer("scales") * self.factor

    @property
    def weight(self) -> Tensor:
        """The float32 weight [N, K], for code of models that multiplies with it itself."""
        centred = _centred(self.get_buffer("codes"), self.get_buffer("zeros"), self.group_size)
        return centred * _spread(self.tuned(), self.group_size, self.in_features)


class _Product(torch.autograd.Function):
    """``x W^T`` with ``W = (codes - zeros) scales``; the float32 weight is not kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Tensor:
        ctx.save_for_backward(x, codes, zeros, scales)
        ctx.group = group
        return nn.functional.linear(x, _centred(codes, zeros, group).mul_(_spread(scales, group, codes.shape[1])))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, codes, zeros, scales = ctx.saved_tensors
        gradient, (n, k), groups = gradients[0], codes.shape, scales.shape[1]
        centred = _centred(codes, zeros, ctx.group)
        of_scales = gradient.reshape(-1, n).T @ x.reshape(-1, k)
        of_scales *= centred
        of_scales = nn.functional.pad(of_scales, (0, groups * ctx.group - k)).view(n, groups, ctx.group).sum(-1)
        of_x = gradient @ centred.mul_(_spread(scales, ctx.group, k)) if ctx.needs_input_grad[0] else None
        return of_x, None, None, of_scales, None


def _spread(values: Tensor, group: int, k: int) -> Tensor:
    """values [N, K / G] -> [N, K]."""
    return values.repeat_interleave(group, 1)[:, :k]


def _centred(codes: Tensor, zeros: Tensor, group: int) -> Tensor:
    """Return codes - zeros, [N, K] float32."""
    return codes.float() - _spread(zeros, group, codes.shape[1])
