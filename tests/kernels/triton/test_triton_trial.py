"""The trial before a GPU is trusted: what is right passes it, what is wrong does not."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.triton import attention as paged
from aiakq.kernels.triton import rows as layers
from aiakq.kernels.triton import self_test as trial


@pytest.mark.parametrize("check", [trial._grouped, trial._integers, trial._rows, trial._attention])
def test_every_kernel_agrees_with_torch(check, device):
    if check is trial._grouped and device.type != "cuda":
        pytest.skip("minutes in the interpreter; test_triton_linear.py has smaller problems")
    torch.manual_seed(0)
    assert check(device) < trial.WRONG


def test_a_wrong_result_is_seen(device, monkeypatch):
    norm, attend = layers.norm, paged.attend
    monkeypatch.setattr(layers, "norm", lambda x, *rest, **more: norm(2 * x, *rest, **more))
    monkeypatch.setattr(paged, "attend", lambda query, *rest: attend(query * 1.5, *rest))
    for check in (trial._rows, trial._attention):
        assert not check(device) < trial.WRONG
