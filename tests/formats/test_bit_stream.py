"""Streams of bits, against Python's integers."""

from __future__ import annotations

import pytest
import torch

from aiakq.formats.bit_stream import unpack_stream


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_read_across_words(bits: int) -> None:
    make = torch.Generator().manual_seed(bits)
    words = torch.randint(-(2**31), 2**31 - 1, (3, 5), generator=make, dtype=torch.int64).to(torch.int32)
    for row, codes in zip(words.tolist(), unpack_stream(words, bits), strict=True):
        whole = sum((word % 2**32) << (32 * place) for place, word in enumerate(row))
        assert codes.tolist() == [(whole >> (bits * place)) % 2**bits for place in range(160 // bits)]
