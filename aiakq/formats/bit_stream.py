"""Codes of 1 to 8 bits that are stored one after the other, in a stream of bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """Return the codes of words, code i in bits i*b to i*b + b - 1 of a row, the lowest bit of a word first.

    words  [R, W] of any integer dtype -> [R, floor(W * bits per word / b)] uint8.
    """
    stream = words.contiguous().view(torch.uint8)
    size = math.lcm(bits, 8) // 8
    count = stream.shape[1] * 8 // bits
    padding = -stream.shape[1] % size
    parts = torch.nn.functional.pad(stream, (0, padding)).unflatten(1, (-1, size)).to(torch.int64)
    whole = (parts << torch.arange(0, 8 * size, 8)).sum(-1, keepdim=True)
    shifts = torch.arange(0, 8 * size, bits)
    codes: Tensor = ((whole >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)[:, :count]
    return codes.contiguous()
