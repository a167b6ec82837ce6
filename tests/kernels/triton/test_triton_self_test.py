"""The self-test before a GPU is used: it passes what is right and fails what is wrong."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.triton import self_test
from aiakq.kernels.triton.attention import TritonAttention
from aiakq.kernels.triton.norm import TritonNorm


@pytest.mark.parametrize("check", [self_test._w4a16, self_test._w8a8, self_test._rows, self_test._attention])
def test_every_kernel_agrees_with_torch(check, device):
    if check is self_test._w4a16 and device.type != "cuda":
        pytest.skip("minutes in the interpreter; test_triton_linear.py has smaller problems")
    torch.manual_seed(0)
    assert check(device) < self_test.MAX_ERROR


def test_a_wrong_result_is_seen(device, monkeypatch):
    norm, attend = TritonNorm.__call__, TritonAttention.attend
    monkeypatch.setattr(TritonNorm, "__call__", lambda self, x, *rest: norm(self, 2 * x, *rest))
    monkeypatch.setattr(TritonAttention, "attend", lambda self, query, *rest: attend(self, query * 1.5, *rest))
    for check in (self_test._rows, self_test._attention):
        assert not check(device) < self_test.MAX_ERROR
