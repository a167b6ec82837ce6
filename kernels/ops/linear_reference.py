"""Torch reference of quantized linear layers, which supports every problem.

Weights stay packed and are unpacked at every call, so it uses the least memory and is the slowest.
w8a8 multiplies integers exactly (int32 accumulation), on the CPU with torch's int8 matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels import packing
from aiakq.kernels.hadamard import rotate
from aiakq.kernels.ops.float8 import FloatCodesLinear, scaled
from aiakq.kernels.ops.linear import LinearLayer, RoundedInputs
from aiakq.kernels.types import LinearInput, LinearProblem, QWeight

HAS_OFFSETS = True


def dequantize(weight: QWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the float weight [N, K] in the natural input order, with ``perm`` and ``rotated`` undone and ``factors``
    multiplied in, computed in float32."""
    if weight.code_type is not None:
        assert weight.perm is None and not weight.rotated, "such codes are stored in the natural order of the inputs"
        w = scaled(weight.codes, weight.scales, weight)
        w = w if weight.rounded is None else w.to(weight.rounded).to(torch.float32)
    else:
        w = _scaled(weight.codes, weight)
        w = rotate(w, inverse=True) if weight.rotated else w
    return (w if weight.factors is None else w * weight.factors.to(torch.float32)).to(dtype)


def _scaled(codes: Tensor, weight: QWeight) -> Tensor:
    """Dequantize codes [N, K] uint8, which ``weight`` need not have, to float32 [N, K] by the formula of QWeight."""
    n, k = codes.shape
    groups, group_size = weight.scales.shape[1], weight.group_size
    values = codes.to(torch.float32) if weight.table is None else weight.table[codes.long()]
    padding = groups * group_size - k
    if padding:
        values = F.pad(values, (0, padding))
    values = values.view(n, groups, group_size)
    if weight.zeros is not None:
        values -= weight.zeros.to(torch.float32).unsqueeze(-1)
    elif weight.table is None and weight.offsets is None:
        values -= 1 << (weight.bits - 1)
    values *= weight.scales.to(torch.float32).unsqueeze(-1)
    if weight.offsets is not None:
        values += weight.offsets.to(torch.float32).unsqueeze(-1)
    values = values.view(n, groups * group_size)[:, :k]
    if weight.rounded is not None:
        values = values.to(weight.rounded).to(torch.float32)
    if weight.perm is not None:
        natural = torch.empty_like(values)
        natural[:, weight.perm] = values
        return natural
    return values


@dataclass(eq=False)
class PackedLinear(LinearLayer):
    """Weight-only layer: codes packed into int32 words along K; other fields as in QWeight."""

    words: Tensor
    stored_bits: int
    weight: QWeight  # without codes
    k: int

    def codes(self) -> Tensor:
        """Return the codes [N, K] uint8."""
        return packing.unpack(self.words, self.stored_bits, count=self.k)

    def __call__(self, x: LinearInput) -> Tensor:
        """x [..., K] -> [..., N] of the same dtype."""
        assert isinstance(x, Tensor)
        w = self.weight
        return F.linear(x, _scaled(self.codes(), w).to(x.dtype), w.bias)


@dataclass(eq=False)
class IntegerLinear(LinearLayer):
    """w8a8 layer: codes [N, K] int8 (signed), scales [N] float32, input_scale scalar or None."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    input_scale: Tensor | None

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, N] of the same dtype."""
        assert isinstance(x, Tensor)
        codes, scale = quantize_activations(x, self.input_scale)
        y = integer_matmul(codes, self.codes).to(torch.float32)
        y *= scale
        y *= self.scales
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)


def prepare(weight: QWeight, problem: LinearProblem) -> LinearLayer:
    """Pack the codes, or convert them to signed for w8a8. ``weight`` is not modified."""
    bias = None if weight.bias is None else weight.bias.to(problem.dtype)
    if weight.code_type is not None:
        floats = FloatCodesLinear(replace(weight, bias=bias))
        return RoundedInputs(floats, weight.input_scale, weight.rounding) if weight.scheme == "fp8a8" else floats
    if weight.scheme == "w8a8":
        assert weight.group_size == weight.k and weight.zeros is None, "w8a8 weights are symmetric, per channel"
        signed = (weight.codes.to(torch.int16) - 128).to(torch.int8)
        return IntegerLinear(signed, weight.scales[:, 0].to(torch.float32), bias, weight.input_scale)
    stored_bits = weight.bits if weight.bits in packing.SUPPORTED_BITS else 8
    words = packing.pack(weight.codes, stored_bits)
    return PackedLinear(words, stored_bits, replace(weight, codes=weight.codes[:0].clone(), bias=bias), weight.k)


def quantize_activations(x: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize activations to symmetric int8: codes [M, K] int8 and scales [M, 1] float32.

    Dynamic: scale = max|x| / 127 per token (row), at least the smallest normal float. Static: the given scale.
    """
    values = x.to(torch.float32)
    if input_scale is None:
        scale = values.abs().amax(dim=-1, keepdim=True).div_(127.0).clamp_(min=torch.finfo(torch.float32).tiny)
    else:
        scale = input_scale.to(torch.float32).reshape(1, 1).expand(x.shape[0], 1)
    return (values / scale).round_().clamp_(-128, 127).to(torch.int8), scale


def integer_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [M, K] int8 by the transpose of b [N, K] int8 -> int32 [M, N], exact."""
    if a.device.type == "cpu":
        return torch._int_mm(a, b.t())
    # CUDA's int8 product requires at least 17 rows and multiples of 8; float64 is exact for any K below 2**38.
    return (a.double() @ b.double().t()).to(torch.int32)
