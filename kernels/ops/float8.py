"""8-bit floats as weight codes and for activations: torch reference of the schemes fp8a16 and fp8a8, and the rounding of
inputs.

e4m3 and e5m2 are the formats of Micikevicius et al. 2022, arXiv:2209.05433. Activations are rounded to e4m3 with a
stored scale, or with scales computed from them, as compressed-tensors, DeepSeek-V3 and FBGEMM do: x / scale, cut off at
+-448, rounded to the nearest e4m3 with ties to even, times scale; all in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.block_floats import round_blocks
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import InputRounding, LinearInput, QWeight

#: The largest e4m3.
LARGEST = 448.0
#: Bytes of decoded weights that exist at once where they are decoded for each product.
_CHUNK_BYTES = 1 << 24


def decode(codes: Tensor, code_type: torch.dtype) -> Tensor:
    """Return the values [N, K] float32 of codes [N, K] uint8, which are the bits of ``code_type``."""
    return codes.contiguous().view(code_type).to(torch.float32)


def round_inputs(x: Tensor, input_scale: Tensor | None, rounding: InputRounding) -> Tensor:
    """Return x [M, K] rounded to e4m3, or what ``rounding`` says, times a scale, as float32.

    input_scale  scalar, the scale of all, or the unit of scales in e4m3; None: scales are computed as ``rounding`` says.
    """
    values = x.to(torch.float32)
    if rounding.scales != "float32":
        return round_blocks(values, input_scale, rounding)
    if input_scale is not None:
        return _rounded(values, input_scale.to(torch.float32).reshape(1, 1))
    k = values.shape[1]
    size = rounding.group or k
    padded = F.pad(values, (0, -k % size)).view(len(values), -1, size)
    scale = padded.abs().amax(-1, keepdim=True).clamp_(max=rounding.bound).div_(LARGEST)
    scale.clamp_(min=rounding.min_scale)
    if rounding.powers_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return _rounded(padded, scale).flatten(1)[:, :k]


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    scaled = (values / scale).clamp_(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).to(torch.float32) * scale


@dataclass(eq=False)
class RoundedInputs(LinearLayer):
    """Rounds its input as ``weight``, without its codes, says, and applies ``inner``."""

    inner: LinearLayer
    weight: QWeight

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K], a Tensor -> [M, N] of the same dtype."""
        assert isinstance(x, Tensor)
        return self.inner(round_inputs(x, self.weight.input_scale, self.weight.rounding).to(x.dtype))


@dataclass(eq=False)
class FloatCodesLinear(LinearLayer):
    """A layer of scheme fp8a16: codes remain 8 bits, and are decoded some rows at a time in every call."""

    weight: QWeight

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, N] of the same dtype."""
        assert isinstance(x, Tensor)
        w = self.weight
        rows = max(1, _CHUNK_BYTES // (4 * w.k))
        y = x.new_empty(len(x), w.n)
        for first in range(0, w.n, rows):
            dense = scaled(w.codes[first : first + rows], w.scales[first : first + rows], w)
            y[:, first : first + rows] = F.linear(x, dense.to(x.dtype))
        return y if w.bias is None else y + w.bias


def scaled(codes: Tensor, scales: Tensor, weight: QWeight) -> Tensor:
    """Return float32 [R, K] of some rows of a weight: codes [R, K] uint8 times scales [R, ceil(K / G)]."""
    assert weight.code_type is not None
    factors = scales.to(torch.float32).repeat_interleave(weight.group_size, dim=1)[:, : codes.shape[1]]
    return decode(codes, weight.code_type) * factors
