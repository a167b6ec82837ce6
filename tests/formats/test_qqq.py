"""QQQ: words that are packed as its own code packs them, and what its kernel computes from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats import qqq, quantization_config
from aiakq.formats.decoded_weight import as_floats

SINGLE = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
GROUPED = [i + 8 * j for i in range(8) for j in range(8)]


def config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "qqq", "wbits": 4, "group_size": -1, **changes}


def packed(codes: Tensor, interleave: tuple[int, ...]) -> Tensor:
    """Codes [K, N] of 4 bits -> B [K/16, 2*N], as pack() of QQQ's QuantLinear does."""
    k, n = codes.shape
    order = []
    for thread in range(32):
        part = [16 * (4 * (thread % 4) + row) + thread // 4 + 8 * block for block in (0, 1) for row in range(4)]
        for tile in range(4):
            order += [256 * tile + place for place in part]
    chosen = torch.tensor(order).view(-1, 8)[:, list(interleave)].flatten()
    tiles = codes.view(k // 16, 16, n // 16, 16).permute(0, 2, 1, 3).reshape(-1, 1024)[:, chosen].view(k // 16, -1)
    words = sum((tiles[:, i::8] & 15) << 4 * i for i in range(8))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def test_one_scale_per_output() -> None:
    """Codes -7 .. 7 are in the high halves of bytes, and scales are a sixteenth."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-7, 8, (32, 64), generator=generator)
    scales = torch.rand(1, 64, generator=generator)
    tensors = {
        "B": packed(codes, (4, 0, 5, 1, 6, 2, 7, 3)),
        "s_channel": (scales / 16).reshape(-1, 32)[:, SINGLE].reshape(1, 64),
        "s_group": torch.empty(0, dtype=torch.float16),
    }
    weight = qqq.read(tensors, quantization_config.read(config()))
    assert (weight.scheme, weight.n, weight.k) == ("w8a8", 64, 32)
    assert torch.equal(as_floats(weight), (codes * scales).T)


def test_groups_are_rounded_to_eight_bits() -> None:
    """As the kernel does: one rounding of (code - 8) * s_group, ties to even."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (256, 64), generator=generator)
    groups = (torch.rand(2, 64, generator=generator) * 15).half()
    groups[0, 0] = 2.5
    scales = torch.rand(1, 64, generator=generator)
    tensors = {
        "B": packed(codes, (0, 2, 4, 6, 1, 3, 5, 7)),
        "s_channel": scales.reshape(-1, 32)[:, SINGLE].reshape(1, 64),
        "s_group": groups.reshape(-1, 64)[:, GROUPED].reshape(2, 64),
    }
    weight = qqq.read(tensors, quantization_config.read(config(group_size=128)))
    expected = torch.round((codes - 8).double() * groups.double().repeat_interleave(128, dim=0))
    assert torch.equal(weight.codes.T.double() - 128, expected)
    assert torch.equal(as_floats(weight), (expected.float() * scales).T)
    for changes in ({"s_group": tensors["s_group"] * 2}, {"s_group": torch.ones(4, 64).half()}):
        with pytest.raises(AiakqError):
            qqq.read({**tensors, **changes}, quantization_config.read(config(group_size=128)))
    with pytest.raises(AiakqError, match="the config has none"):
        qqq.read(tensors, quantization_config.read(config()))


@pytest.mark.parametrize(
    "changes", [{"wbits": 8}, {"desc_act": True}, {"sym": False}, {"more": 1}, {"group_size": "x"}], ids=str
)
def test_other_configs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        quantization_config.read(config(**changes))
    assert caught.value.id == "format_unsupported"


@pytest.mark.parametrize(
    "changes", [{"B": torch.zeros(2, 64, dtype=torch.int32)}, {"s_channel": torch.ones(1, 32)}], ids=str
)
def test_damaged_tensors_are_refused(changes: dict[str, Tensor]) -> None:
    tensors = {"B": torch.zeros(2, 128, dtype=torch.int32), "s_channel": torch.ones(1, 64)}
    assert qqq.read(tensors, quantization_config.read(config())).n == 64
    with pytest.raises(AiakqError):
        qqq.read({**tensors, **changes}, quantization_config.read(config()))
