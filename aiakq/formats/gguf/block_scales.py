"""Scales of blocks that are chosen before their codes, for rounding that does not take the nearest code.

The search is that of encoding.py; here the codes of a block come later, and are packed with the scales that were found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from aiakq.formats.gguf import rounding
from aiakq.formats.gguf.encoding import AFFINE, SUPER_AFFINE, SYMMETRIC, pack_block, pack_q6_k, pack_super_affine
from aiakq.formats.gguf.rounding import CodeLevels


@dataclass(frozen=True)
class BlockScales:
    """The scales of B blocks with S groups each: ``value = code * scale - minimum``.

    scales   [B, S] float32, of either sign.
    minima   [B, S] float32.
    pack     makes the blocks [B, bytes] uint8 of codes [B, values of a block], numbers from 0 on.
    """

    scales: Tensor
    minima: Tensor
    pack: Callable[[Tensor], Tensor]


#: From values [B, V] and the weights of their squared errors [B, V], or None.
_Search = Callable[[Tensor, Tensor | None], BlockScales]


def block_scales(values: Tensor, kind: str, weights: Tensor | None = None) -> BlockScales:
    """Return the scales with the smallest squared error of blocks [B, V] float32, if every code is the nearest.

    kind     a key of SEARCHES.
    weights  [B, V] or [V], positive: by how much squared errors count; None: all alike.
    """
    return SEARCHES[kind](values, None if weights is None else weights.expand(values.shape))


def _groups(values: Tensor, weights: Tensor | None, size: int) -> rounding.Groups:
    columns = None if weights is None else weights.reshape(-1, size).T.contiguous()
    return rounding.Groups(values.reshape(-1, size).T.contiguous(), columns)


def _symmetric(kind: str, low: int, high: int) -> _Search:
    def search(values: Tensor, weights: Tensor | None) -> BlockScales:
        d = rounding.half(rounding.symmetric_scales(_groups(values, weights, 32), CodeLevels(low, high))).unsqueeze(1)
        return BlockScales(d, -low * d, partial(_pack_32, kind, d.half(), None))

    return search


def _affine(kind: str, high: int) -> _Search:
    def search(values: Tensor, weights: Tensor | None) -> BlockScales:
        scales, minima = rounding.affine_scales(_groups(values, weights, 32), high, nonnegative=False)
        d, m = rounding.half(scales).unsqueeze(1), rounding.half(-minima).unsqueeze(1)
        return BlockScales(d, -m, partial(_pack_32, kind, d.half(), m.half()))

    return search


def _pack_32(kind: str, d: Tensor, m: Tensor | None, codes: Tensor) -> Tensor:
    return pack_block(kind, codes, d, m)


def _super_affine(high: int) -> _Search:
    def search(values: Tensor, weights: Tensor | None) -> BlockScales:
        d, dmin, scales, minima, _ = rounding.super_affine(_groups(values, weights, 32), 8, high, 63)

        def pack(codes: Tensor) -> Tensor:
            return pack_super_affine(codes, d, dmin, scales, minima, high=high)

        return BlockScales(d[:, None] * scales, dmin[:, None] * minima, pack)

    return search


def _q6_k(values: Tensor, weights: Tensor | None) -> BlockScales:
    d, scales, _ = rounding.super_symmetric(_groups(values, weights, 16), 16, CodeLevels(-32, 31), (-128, 127))
    whole = d[:, None] * scales
    return BlockScales(whole, 32 * whole, lambda codes: pack_q6_k(codes, d, scales))


#: Name of a kind -> the search.
SEARCHES: Mapping[str, _Search] = {
    **{kind: _symmetric(kind, *codes) for kind, codes in SYMMETRIC.items()},
    **{kind: _affine(kind, high) for kind, high in AFFINE.items()},
    **{kind: _super_affine(high) for kind, high in SUPER_AFFINE.items()},
    "Q6_K": _q6_k,
}
