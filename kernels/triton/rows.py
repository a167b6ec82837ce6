"""Launching rows.py and rotary.py: the counterpart of kernels/cpu/rows.py on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.types import Arranged, Arranging, Rounded, Rounding, Rows, Wish

#: Activation functions, in the order of rows.py.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
#: Columns of a program that computes a part of a row.
COLUMNS = 1024


def block_for(width: int) -> int:
    """The columns of a program that computes all of so wide a row."""
    return 1 << (width - 1).bit_length()


def warps_for(block: int) -> int:
    """Of a program that computes so many columns."""
    return min(16, max(1, block // 512))


def sums_for(x: Tensor, wish: Arranging) -> Tensor | None:
    """Where the sums of rows like x [M, K] go."""
    if not wish.stride:
        return None
    planes = x.shape[1] // wish.plane
    count = planes if wish.per_plane else 2 * planes // (16 // wish.bits)
    return torch.empty(count, wish.stride, dtype=torch.float32, device=x.device)


@dataclass
class _Out:
    """What a kernel of rows.py writes for rows like x [M, D]: the same, or what is wished for.

    arguments  y, y's scales, and the scale that is given.
    """

    made: Rows
    arguments: tuple[Tensor, Tensor, Tensor]
    more: dict[str, Any]

    @staticmethod
    def of(x: Tensor, wish: Wish) -> _Out:
        if isinstance(wish, Rounding):
            codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
            scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
            given = scales if wish.given is None else wish.given
            more = {"CODES": True, "GIVEN": wish.given is not None}
            return _Out(Rounded(codes, scales, x.dtype), (codes, scales, given), more)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        plain = {"CODES": False, "GIVEN": False}
        if wish is None:
            return _Out(y, (y, y, y), plain)
        sums = sums_for(x, wish)
        arranged = {
            "sums_ptr": sums, "sums_stride": wish.stride, "SUMS": sums is not None, "PER_PLANE": wish.per_plane,
            "BITS": wish.bits, "BKP": wish.plane,
        }  # fmt: skip
        if wish.perm is not None:
            arranged |= {"perm_ptr": wish.perm, "PERM": True}
        return _Out(Arranged(y, sums), (y, y, y), plain | arranged)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    centered: bool = False,
    wish: Wish = None,
) -> Rows:
    """x [M, D] -> the same, as NativeNorm: ``residual`` is added to x, in place, first; or what is wished for."""
    from aiakq.kernels.triton.rows_kernel import norm_kernel

    m, d = x.shape
    out = _Out.of(x, wish)
    added = x if residual is None else residual
    block = block_for(d)
    if m:
        norm_kernel[(m,)](
            x, added, weight, weight if bias is None else bias, *out.arguments, x.stride(0), added.stride(0), d,
            epsilon, D=d, BLOCK=block, RESIDUAL=residual is not None, CENTERED=centered, BIAS=bias is not None,
            **out.more, num_warps=warps_for(block),
        )  # fmt: skip
    return out.made


def gate(activation: str, x: Tensor, up: Tensor | None = None, wish: Wish = None) -> Rows:
    """act(x) * up, or act(x): [M, I], of which rows may be further apart; or what is wished for."""
    from aiakq.kernels.triton.rows_kernel import gate_kernel

    m, d = x.shape
    if isinstance(wish, Arranging) and wish.perm is not None:
        # No program here has a whole row, as another order takes.
        wish = None
    out = _Out.of(x, wish)
    other = x if up is None else up
    # The scale of a row is of all of it.
    block = block_for(d) if isinstance(wish, Rounding) else min(COLUMNS, block_for(d))
    if m:
        gate_kernel[(m, -(-d // block))](
            x, other, *out.arguments, x.stride(0), other.stride(0), d,
            D=d, BLOCK=block, ACTIVATION=ACTIVATIONS.index(activation), UP=up is not None, **out.more,
            num_warps=warps_for(block),
        )  # fmt: skip
    return out.made


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
        from aiakq.kernels.triton.rotary_kernel import rotary_kernel

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
                H=self.heads, HKV=self.kv_heads, D=size, WIDTH=block_for(size), ROTATED=turned,
                NORM=self.q_norm is not None, SCALED=bool(scales), num_warps=1,
            )  # fmt: skip
        return qkv[:, :width].unflatten(1, (self.heads, size))
