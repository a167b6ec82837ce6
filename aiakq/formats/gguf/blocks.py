"""The blocks of quantized kinds, taken apart into codes, scales and offsets, in the float32 operations of ggml.

Facts from ggml-common.h and gguf-py's quants.py. B blocks of V values have G values for each scale:

    Q4_0 Q5_0 Q8_0      G = V = 32: (code - 2**(bits - 1)) * d
    Q4_1 Q5_1           G = V = 32: code * d + m
    Q2_K Q4_K Q5_K      V = 256, G = 16, 32, 32: code * (d * scale) - dmin * min, integers of 4 or 6 bits per group
    Q3_K Q6_K           V = 256, G = 16: (code - 2**(bits - 1)) * (d * scale)
    IQ4_NL IQ4_XS       a table of 16 values; V = G = 32, and V = 256, G = 32 with scales of 6 bits
    MXFP4               e2m1 values, V = G = 32, scales are powers of two
    TQ1_0 TQ2_0         V = G = 256: (code - 1) * d
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.spec import LayerSpec


@dataclass(frozen=True)
class Unpacked:
    """Blocks taken apart: codes [B, V] uint8, scales [B, V / G] float16 or float32, offsets [B, V / G] or None.

    zero  zero point of all codes; None: 2**(bits - 1), or none if there are offsets or a table.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    zero: int | None = None


@dataclass(frozen=True)
class Layout:
    """How blocks of one kind are read: ``unpack`` takes [B, bytes] uint8."""

    bits: int
    group_size: int
    unpack: Callable[[Tensor], Unpacked]
    symmetric: bool = True
    table: str | None = None

    @property
    def spec(self) -> LayerSpec:
        """The layer's values in a QuantSpec."""
        return LayerSpec(self.bits, self.group_size, self.symmetric, table=self.table)


def _split(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Return consecutive fields of blocks, of these numbers of bytes."""
    fields: tuple[Tensor, ...] = blocks.split(list(sizes), dim=1)
    return fields


def _half(field: Tensor) -> Tensor:
    """Return [B, n] float16 from [B, 2n] uint8."""
    return field.contiguous().view(torch.float16)


def _fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """Return codes [B, n] from bytes with 8 / ``bits`` codes each: in every ``run`` bytes, first the lowest bits of
    all, then the next ones.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    runs = packed.reshape(len(packed), -1, 1, run)
    codes: Tensor = ((runs >> shifts[:, None]) & (2**bits - 1)).flatten(1)
    return codes


def _times(d: Tensor, integers: Tensor) -> Tensor:
    """Return [B, n] float32: d [B, 1] float16 times integers."""
    return d.float() * integers.float()


def _q4_0(blocks: Tensor) -> Unpacked:
    d, low = _split(blocks, 2, 16)
    return Unpacked(_fields(low, 4, 16), _half(d))


def _q4_1(blocks: Tensor) -> Unpacked:
    d, m, low = _split(blocks, 2, 2, 16)
    return Unpacked(_fields(low, 4, 16), _half(d), _half(m))


def _q5_0(blocks: Tensor) -> Unpacked:
    d, high, low = _split(blocks, 2, 4, 16)
    return Unpacked(_fields(low, 4, 16) | (_fields(high, 1, 1) << 4), _half(d))


def _q5_1(blocks: Tensor) -> Unpacked:
    d, m, high, low = _split(blocks, 2, 2, 4, 16)
    return Unpacked(_fields(low, 4, 16) | (_fields(high, 1, 1) << 4), _half(d), _half(m))


def _q8_0(blocks: Tensor) -> Unpacked:
    d, codes = _split(blocks, 2, 32)
    return Unpacked(codes ^ 0x80, _half(d))


def _q2_k(blocks: Tensor) -> Unpacked:
    both, low, d, dmin = _split(blocks, 16, 64, 2, 2)
    return Unpacked(_fields(low, 2, 32), _times(_half(d), both & 15), -_times(_half(dmin), both >> 4))


def _q3_k(blocks: Tensor) -> Unpacked:
    high, low, packed, d = _split(blocks, 32, 64, 12, 2)
    scales = _fields(packed[:, :8], 4, 8) | (_fields(packed[:, 8:], 2, 4) << 4)
    return Unpacked(_fields(low, 2, 32) | (_fields(high, 1, 32) << 2), _times(_half(d), scales.to(torch.int8) - 32))


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 minima of 6 bits from [B, 12] uint8.

    The first four of each are the low bits of bytes 0 to 3 and 4 to 7, whose two high bits are those of the last four;
    these have their low bits in the halves of bytes 8 to 11.
    """
    first, second, third = _split(packed, 4, 4, 4)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)
    return scales, minima


def _q4_k(blocks: Tensor) -> Unpacked:
    d, dmin, packed, low = _split(blocks, 2, 2, 12, 128)
    scales, minima = _scales_and_minima(packed)
    return Unpacked(_fields(low, 4, 32), _times(_half(d), scales), -_times(_half(dmin), minima))


def _q5_k(blocks: Tensor) -> Unpacked:
    d, dmin, packed, high, low = _split(blocks, 2, 2, 12, 32, 128)
    scales, minima = _scales_and_minima(packed)
    codes = _fields(low, 4, 32) | (_fields(high, 1, 32) << 4)
    return Unpacked(codes, _times(_half(d), scales), -_times(_half(dmin), minima))


def _q6_k(blocks: Tensor) -> Unpacked:
    low, high, scales, d = _split(blocks, 128, 64, 16, 2)
    codes = _fields(low, 4, 64) | (_fields(high, 2, 32) << 4)
    return Unpacked(codes, _times(_half(d), scales.contiguous().view(torch.int8)))


def _iq4_nl(blocks: Tensor) -> Unpacked:
    return _q4_0(blocks)


def _iq4_xs(blocks: Tensor) -> Unpacked:
    d, high, low, codes = _split(blocks, 2, 2, 4, 128)
    scales = _fields(low, 4, 1) | (_fields(high, 2, 1) << 4)
    return Unpacked(_fields(codes, 4, 16), _times(_half(d), scales.to(torch.int8) - 32))


def _mxfp4(blocks: Tensor) -> Unpacked:
    exponents, codes = _split(blocks, 1, 16)
    scales = torch.exp2(exponents.double() - 127)
    return Unpacked(_fields(codes, 4, 16), scales.float().masked_fill(exponents == 255, torch.nan))


def _tq1_0(blocks: Tensor) -> Unpacked:
    first, second, last, d = _split(blocks, 32, 16, 4, 2)
    digits = [
        (part[:, None] * torch.tensor(powers, dtype=torch.uint8)[:, None]).flatten(1)
        for part, powers in ((first, [1, 3, 9, 27, 81]), (second, [1, 3, 9, 27, 81]), (last, [1, 3, 9, 27]))
    ]
    codes = (torch.cat(digits, dim=1).to(torch.int16) * 3) >> 8
    return Unpacked(codes.to(torch.uint8), _half(d), zero=1)


def _tq2_0(blocks: Tensor) -> Unpacked:
    codes, d = _split(blocks, 64, 2)
    return Unpacked(_fields(codes, 2, 32), _half(d), zero=1)


#: Name of a kind -> how its blocks are read.
LAYOUTS: Mapping[str, Layout] = {
    "Q4_0": Layout(4, 32, _q4_0),
    "Q4_1": Layout(4, 32, _q4_1, symmetric=False),
    "Q5_0": Layout(5, 32, _q5_0),
    "Q5_1": Layout(5, 32, _q5_1, symmetric=False),
    "Q8_0": Layout(8, 32, _q8_0),
    "Q2_K": Layout(2, 16, _q2_k, symmetric=False),
    "Q3_K": Layout(3, 16, _q3_k),
    "Q4_K": Layout(4, 32, _q4_k, symmetric=False),
    "Q5_K": Layout(5, 32, _q5_k, symmetric=False),
    "Q6_K": Layout(6, 16, _q6_k),
    "IQ4_NL": Layout(4, 32, _iq4_nl, table="iq4_nl"),
    "IQ4_XS": Layout(4, 32, _iq4_xs, table="iq4_nl"),
    "MXFP4": Layout(4, 32, _mxfp4, table="e2m1"),
    "TQ1_0": Layout(2, 256, _tq1_0, symmetric=False),
    "TQ2_0": Layout(2, 256, _tq2_0, symmetric=False),
}
