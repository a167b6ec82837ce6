"""Marlin, against a forward permutation written from the kernel's definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import marlin, quantization_config


def pack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """codes [K, N] and scales [ng, N] -> B [K/16, 2*N] and s [ng, N], code by code, as threads read them."""
    k, n = codes.shape
    words = torch.zeros(k // 16, 2 * n, dtype=torch.int64)
    for row in range(k // 16):
        for column in range(n // 64):
            place = 0
            for thread in range(32):
                for tile in range(4):
                    # mma.m16n8k16: a thread holds four inputs of one output, in two halves of 8 outputs.
                    held = [
                        (16 * row + 2 * (thread % 4) + step, 64 * column + 16 * tile + 8 * half + thread // 4)
                        for half in (0, 1)
                        for step in (0, 1, 8, 9)
                    ]
                    for field, source in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                        word = column * 128 + place // 8
                        words[row, word] |= int(codes[held[source]]) << (4 * field)
                        place += 1
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    size = 64 if len(scales) > 1 else 32
    stored = torch.empty_like(scales)
    for group in range(len(scales)):
        for output in range(n):
            first, inner = output // size * size, output % size
            if size == 64:
                source = first + inner % 8 * 8 + inner // 8
            else:
                pair, step = divmod(inner, 8)
                source = first + 2 * pair + (0, 1, 8, 9, 16, 17, 24, 25)[step]
            stored[group, output] = scales[group, source]
    return words, stored


@pytest.mark.parametrize(("names", "groups"), [(("B", "s"), 2), (("qweight", "scales"), 2), (("B", "s"), 1)])
def test_codes_and_scales_are_put_into_their_natural_order(names: tuple[str, str], groups: int) -> None:
    make = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (64, 128), generator=make, dtype=torch.uint8)
    scales = torch.rand(groups, 128, generator=make).half() + 0.5
    tensors = dict(zip(names, pack(codes, scales), strict=True))
    size = 64 // groups
    spec = quantization_config.read(
        {"quant_method": "gptq", "is_marlin_format": True, "bits": 4, "group_size": size if groups > 1 else -1}
    )
    weight = formats.load("marlin").read(tensors, spec)
    assert torch.equal(weight.codes, codes.T)
    assert torch.equal(weight.scales, scales.T) and weight.group_size == size


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "is_marlin_format": True, "sym": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "marlin", "zero_point": False},
        {"quant_method": "marlin", "group_size": 128},
    ],
)
def test_configs_of_three_tools_say_marlin(config: dict[str, Any]) -> None:
    spec = quantization_config.read(config)
    assert (spec.format, spec.bits, spec.group_size) == ("marlin", 4, 128)


@pytest.mark.parametrize("change", [{"bits": 8}, {"sym": False}, {"desc_act": True}, {"dynamic": {"a": {"bits": 8}}}])
def test_what_the_kernel_cannot_hold_is_refused(change: dict[str, Any]) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "is_marlin_format": True, **change}
    with pytest.raises(AiakqError, match="Marlin with"):
        quantization_config.read(config)


def test_tensors_of_other_shapes_are_refused() -> None:
    spec = quantization_config.read({"quant_method": "marlin", "group_size": -1})
    tensors = {"B": torch.zeros(4, 256, dtype=torch.int32), "s": torch.ones(1, 64, dtype=torch.float16)}
    with pytest.raises(AiakqError, match="B has shape"):
        marlin.read(tensors, spec)
