"""Launching rows.py and rotary.py: the counterpart of kernels/cpu/rows.py on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Activation functions, in the order of rows.py.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
#: Columns of a program that computes a part of a row.
COLUMNS = 1024


def _block(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, residual: Tensor | None, centered: bool = False
) -> Tensor:
    """x [M, D] -> the same, as NativeNorm: ``residual`` is added to x, in place, first."""
    from aiakq.kernels.triton.rows import norm_kernel

    m, d = x.shape
    y = torch.empty((m, d), dtype=x.dtype, device=x.device)
    added = x if residual is None else residual
    block = _block(d)
    if m:
        norm_kernel[(m,)](
            x, added, weight, weight if bias is None else bias, y, y, y, x.stride(0), added.stride(0), d, epsilon,
            D=d, BLOCK=block, RESIDUAL=residual is not None, CENTERED=centered, BIAS=bias is not None, CODES=False,
            GIVEN=False, num_warps=_warps(block),
        )  # fmt: skip
    return y


def gate(activation: str, x: Tensor, up: Tensor | None = None) -> Tensor:
    """act(x) * up, or act(x): [M, I], of which rows may be further apart."""
    from aiakq.kernels.triton.rows import gate_kernel

    m, d = x.shape
    y = torch.empty((m, d), dtype=x.dtype, device=x.device)
    other = x if up is None else up
    block = min(COLUMNS, _block(d))
    if m:
        gate_kernel[(m, -(-d // block))](
            x, other, y, y, y, x.stride(0), other.stride(0), d,
            D=d, BLOCK=block, ACTIVATION=ACTIVATIONS.index(activation), UP=up is not None, CODES=False, GIVEN=False,
            num_warps=_warps(block),
        )  # fmt: skip
    return y


@dataclass
class Heads:
    """What comes between the projections and attention in one layer.

    cosines, sines  [positions, rotated / 2] float32, or None where nothing is turned.
    q_norm, k_norm  weights [D] of RMS norms of every head, or None.
    """

    heads: int
    kv_heads: int
    size: int
    cosines: Tensor | None = None
    sines: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    epsilon: float = 0.0

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: Sequence[Tensor], slots: Tensor) -> Tensor:
        """qkv [T, (H + 2 Hkv) D], whose queries are changed, -> queries [T, H, D]; the rest goes into ``cache``."""
        from aiakq.kernels.triton.rotary import rotary_kernel

        tokens, size = qkv.shape[0], self.size
        width, kv_width = self.heads * size, self.kv_heads * size
        keys, values, *scales = cache
        turned = 0 if self.cosines is None or positions is None else 2 * self.cosines.shape[1]
        nothing = keys
        if tokens:
            rotary_kernel[(tokens, self.heads + self.kv_heads)](
                qkv, qkv[:, width:], qkv[:, width + kv_width :],
                nothing if self.q_norm is None else self.q_norm, nothing if self.k_norm is None else self.k_norm,
                self.cosines if turned else nothing, self.sines if turned else nothing,
                positions if turned else slots, slots, keys, values, *(scales or (nothing, nothing)),
                qkv.stride(0), qkv.stride(0), qkv.stride(0), self.epsilon,
                H=self.heads, HKV=self.kv_heads, D=size, WIDTH=_block(size), ROTATED=turned,
                NORM=self.q_norm is not None, SCALED=bool(scales), num_warps=1,
            )  # fmt: skip
        return qkv[:, :width].unflatten(1, (self.heads, size))
