"""Bit packing in torch: b-bit codes in 32-bit words, as a little-endian bit stream along a dimension.

Code i occupies bits [i*b, (i+1)*b) of the stream; word w holds bits [32*w, 32*(w+1)). For 2, 4 and 8 bits that is
32/b fields per word, lowest first; 3-bit codes straddle words (32 codes in 3 words). This is the field order of
GPTQ, AWQ (before its interleave) and compressed-tensors.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

SUPPORTED_BITS = (2, 3, 4, 8)

assert sys.byteorder == "little", "words are assembled through byte views, which need a little-endian machine"


def words_for(count: int, bits: int) -> int:
    """Return the number of int32 words that hold ``count`` codes of ``bits`` bits; the last one may be padded."""
    return -(-count * bits // 32)


def pack(codes: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Pack codes into words along ``dim``.

    codes [..., L, ...] of any integer dtype, each in 0 .. 2**bits - 1 (not checked) -> int32 [..., ceil(L*b/32), ...].
    The unused high bits of the last word are zero.
    """
    assert bits in SUPPORTED_BITS, bits
    rows = codes.to(torch.uint8).movedim(dim, -1)
    count = rows.shape[-1]
    # Pad to whole words. 3 bits: 8 codes fill 3 bytes, so 32 codes end at a word boundary.
    step = 32 if bits == 3 else 32 // bits
    padding = -count % step
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    if bits == 8:
        stream = rows.contiguous()
    elif bits == 4:
        stream = rows[..., 0::2] | (rows[..., 1::2] << 4)
    elif bits == 2:
        stream = rows[..., 0::4] | (rows[..., 1::4] << 2) | (rows[..., 2::4] << 4) | (rows[..., 3::4] << 6)
    else:
        shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=rows.device)
        triples = (rows.unflatten(-1, (-1, 8)).to(torch.int32) << shifts).sum(-1, dtype=torch.int32)
        stream = torch.stack((triples, triples >> 8, triples >> 16), dim=-1).to(torch.uint8).flatten(-2)
    # clone, not contiguous: a dimension of size 1 may keep a stride that ``contiguous`` accepts and ``view`` does not.
    words = stream.clone(memory_format=torch.contiguous_format).view(torch.int32)[..., : words_for(count, bits)]
    return words.movedim(-1, dim).contiguous()


#: Bits of a code -> the integers whose bytes are the codes of a byte, the shifts that move codes there, and the mask.
_SPREAD = {4: (torch.int16, (4,), 0x0F0F), 2: (torch.int32, (6, 12, 18), 0x03030303)}
#: Bytes that are spread at once, so that intermediate integers stay in a cache.
_CHUNK = 1 << 17


def _spread(stream: Tensor, bits: int) -> Tensor:
    """Return the codes [B * 8/b] uint8 in bytes [B] uint8, b = 4 or 2: each code is shifted to a byte of its own."""
    dtype, shifts, mask = _SPREAD[bits]
    codes = torch.empty(len(stream), dtype=dtype, device=stream.device)
    step = _CHUNK if stream.device.type == "cpu" else max(1, len(stream))
    # No memory is allocated in the loop: new pages would take longer than the arithmetic.
    spare = [torch.empty(min(step, len(stream)), dtype=dtype, device=stream.device) for _ in range(2)]
    for part, out in zip(stream.split(step), codes.split(step), strict=True):
        whole, moved = (each[: len(part)] for each in spare)
        whole.copy_(part)
        out.copy_(whole)
        for shift in shifts:
            out |= torch.bitwise_left_shift(whole, shift, out=moved)
        out &= mask
    return codes.view(torch.uint8)


def unpack(words: Tensor, bits: int, dim: int = -1, count: int | None = None) -> Tensor:
    """The inverse of ``pack``.

    words int32 [..., W, ...] -> uint8 [..., count, ...]; ``count`` defaults to the number of whole codes in the words.
    """
    assert bits in SUPPORTED_BITS, bits
    assert words.dtype == torch.int32, words.dtype
    rows = words.movedim(dim, -1).contiguous()
    if rows.stride(-1) != 1:  # a row of a single word counts as contiguous with any stride
        rows = rows.clone(memory_format=torch.contiguous_format)
    available = rows.shape[-1] * 32 // bits
    count = available if count is None else count
    assert count <= available, (count, available)
    if bits == 3 and rows.shape[-1] % 3:
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 3))
    stream = rows.view(torch.uint8)
    if bits == 8:
        codes = stream
    elif bits == 3:
        parts = stream.unflatten(-1, (-1, 3)).to(torch.int32)
        triples = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16)
        shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=rows.device)
        codes = ((triples.unsqueeze(-1) >> shifts) & 7).to(torch.uint8).flatten(-2)
    else:
        codes = _spread(stream.reshape(-1), bits).view(*stream.shape[:-1], stream.shape[-1] * 8 // bits)
    return codes[..., :count].movedim(-1, dim).contiguous()
