"""Numbers of embeddings in other formats are those that torch computes."""

from __future__ import annotations

import sys

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.server.api.pooling.number_encoding import NumberEncoding, metadata_header

VALUES = torch.tensor(
    [0.0, -0.0, 1.0, -1.5, 3.14159, 1e-8, 65504.0, 1e6, 1.00390625, 1.01171875, float("inf"), float("nan")]
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_numbers_are_converted_as_torch_does(dtype, endianness):
    data = NumberEncoding("base64", dtype, endianness).encode(VALUES.numpy().tobytes())
    size = 4 if dtype == "float32" else 2
    if endianness not in ("native", sys.byteorder):
        data = b"".join(data[at : at + size][::-1] for at in range(0, len(data), size))
    found = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    torch.testing.assert_close(found, VALUES.to(getattr(torch, dtype)), rtol=0, atol=0, equal_nan=True)


def test_positions_of_vectors():
    body, items = NumberEncoding("bytes", "float16", "little").body([bytes(8), bytes(16)], [(2,), (2, 2)])
    assert len(body) == 12 and [(item["start"], item["end"]) for item in items] == [(0, 4), (4, 12)]
    assert items[1]["shape"] == [2, 2] and items[1]["embed_dtype"] == "float16"


def test_what_cannot_be_encoded_is_refused():
    with pytest.raises(AiakqError):
        NumberEncoding("base64", "fp8_e4m3").check()
    with pytest.raises(AiakqError):
        metadata_header({"data": ["x" * 100] * 200})
