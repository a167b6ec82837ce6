"""The dtype in which encoders compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aiakq.runtime.multimodal import encoder_files
from aiakq.runtime.multimodal.encoder_files import encoder_dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encoders_compute_in_float32_on_cpus_without_16_bit_products(monkeypatch, dtype):
    assert encoder_dtype(config("cpu", dtype)) in (dtype, torch.float32)
    for has, expected in ((False, torch.float32), (True, dtype)):
        monkeypatch.setattr(encoder_files, "_multiplies", lambda dtype, has=has: has)
        assert encoder_dtype(config("cpu", dtype)) == expected
    assert encoder_dtype(config("cuda", dtype)) == dtype


def test_float32_stays():
    assert encoder_dtype(config("cpu", torch.float32)) == torch.float32


def config(device, dtype):
    return SimpleNamespace(device=SimpleNamespace(device=torch.device(device), dtype=dtype))
