"""Bit packing against words written by hand, against numpy's bit order, and there and back."""

import numpy as np
import pytest
import torch

from aiakq.kernels import packing
from aiakq.kernels.packing import SUPPORTED_BITS, pack, unpack, words_for


def words(*values: int) -> torch.Tensor:
    return torch.tensor([value - 2**32 if value >= 2**31 else value for value in values], dtype=torch.int32)


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (4, range(8), words(0x76543210)),
        (4, range(15, 7, -1), words(0x89ABCDEF)),
        (8, [0x10, 0x32, 0x54, 0xF6], words(0xF6543210)),
        (2, [0, 1, 2, 3] * 4, words(0xE4E4E4E4)),
        # 3 bits, all fours: a one in every third bit; code 10 straddles words 0 and 1, code 21 words 1 and 2.
        (3, [4] * 32, words(0x24924924, 0x49249249, 0x92492492)),
        (3, [0] * 10 + [7] + [0] * 21, words(0xC0000000, 0x00000001, 0)),
        (3, [0] * 21 + [7] + [0] * 10, words(0, 0x80000000, 0x00000003)),
    ],
)
def test_words_written_by_hand(bits: int, codes: list[int], expected: torch.Tensor) -> None:
    packed = pack(torch.tensor(list(codes)), bits)
    assert packed.tolist() == expected.tolist()
    assert unpack(packed, bits).tolist() == list(codes)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("shape", [(32,), (3, 64), (5, 2, 96), (7, 45), (1, 1)])
@pytest.mark.parametrize("dim", [0, -1])
def test_unpacking_reverses_packing(bits: int, shape: tuple[int, ...], dim: int) -> None:
    codes = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits, dim)
    assert packed.dtype == torch.int32
    assert packed.shape[dim] == words_for(shape[dim], bits)
    assert torch.equal(unpack(packed, bits, dim, count=shape[dim]), codes.to(torch.uint8))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_is_one_little_endian_bit_stream(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (4, 64), generator=torch.Generator().manual_seed(1))
    stream = np.unpackbits(pack(codes, bits).numpy().view(np.uint8), axis=-1, bitorder="little")
    values = stream.reshape(4, 64, bits) @ (1 << np.arange(bits))
    assert np.array_equal(values, codes.numpy())


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_a_single_column_packs_along_the_other_dimension(bits: int) -> None:
    codes = torch.arange(64).remainder(2**bits).to(torch.uint8).unsqueeze(1)
    packed = pack(codes, bits, dim=0)
    assert packed.shape == (words_for(64, bits), 1)
    assert torch.equal(unpack(packed, bits, dim=0, count=64), codes)


def test_a_single_word_along_the_packed_dimension():
    codes = torch.arange(8, dtype=torch.uint8).repeat(5, 1).T.contiguous()
    assert torch.equal(unpack(pack(codes, 4, dim=0), 4, dim=0), codes)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_bytes_are_spread_some_at_a_time(bits: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 2**bits, (5, 96), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    monkeypatch.setattr(packing, "_CHUNK", chunk)
    assert torch.equal(unpack(pack(codes, bits), bits), codes)
    assert unpack(pack(codes, bits).to("meta"), bits).shape == codes.shape
    assert unpack(torch.empty(0, 3, dtype=torch.int32), bits).shape == (0, 96 // bits)
