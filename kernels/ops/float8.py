"""8-bit floats as weight codes: torch reference of the schemes fp8a16 and, with rounded inputs, fp8a8.

e4m3 and e5m2 are the formats of Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import LinearInput, QWeight

#: Bytes of decoded weights that exist at once where they are decoded for each product.
_CHUNK_BYTES = 1 << 24


def decode(codes: Tensor, code_type: torch.dtype) -> Tensor:
    """Return the values [N, K] float32 of codes [N, K] uint8, which are the bits of ``code_type``."""
    return codes.contiguous().view(code_type).to(torch.float32)


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
