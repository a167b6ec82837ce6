"""The roundings of activations in examples/gguf_reference.py, against the blocks of the gguf package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "gguf_reference.py"


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("gguf")
    spec = importlib.util.spec_from_file_location("gguf_reference", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blocks_of_32_are_those_of_q8_0(reference):
    gguf = pytest.importorskip("gguf")
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    x[1, :32] = 0
    codes, scales = reference.round_32(x)
    blocks = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    values = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    assert torch.equal((codes * scales.half().float()).flatten(-2), values)


def test_blocks_of_256_have_one_scale_and_127_at_the_largest_value(reference):
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(2))
    x[0, :256] = 0
    found = reference.round_256(x)
    assert not found[0, :256].any()
    step = x.unflatten(-1, (-1, 256)).abs().amax(-1, keepdim=True).double() / 127
    error = (found - x).unflatten(-1, (-1, 256)).abs()
    assert (error <= step * 0.5001).all()
    peak = x[1].abs().argmax()
    torch.testing.assert_close(found[1, peak], x[1, peak].double())
