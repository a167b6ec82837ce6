"""The self-test before a GPU is used: it passes what is right and fails what is wrong."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.triton import configs, self_test
from aiakq.kernels.triton.attention import TritonAttention
from aiakq.kernels.triton.norm import TritonNorm
from aiakq.kernels.triton.recurrence import TritonRecurrence


@pytest.mark.parametrize("family", self_test.FAMILIES)
def test_every_family_agrees_with_torch(family, device):
    if family in ("weight-only linear", "float linear", "4-bit float linear", "fp8 linear") and device.type != "cuda":
        pytest.skip("minutes in the interpreter; test_triton_linear.py and its like have smaller problems")
    torch.manual_seed(0)
    found = self_test.examine(family, device)
    assert found.failure is None and found.error < self_test.MAX_ERROR


def test_a_wrong_result_is_seen(device, monkeypatch):
    norm, attend = TritonNorm.__call__, TritonAttention.attend
    monkeypatch.setattr(TritonNorm, "__call__", lambda self, x, *rest: norm(self, 2 * x, *rest))
    monkeypatch.setattr(TritonAttention, "attend", lambda self, query, *rest: attend(self, query * 1.5, *rest))
    recur = TritonRecurrence.__call__
    monkeypatch.setattr(TritonRecurrence, "__call__", lambda self, x, *rest: 1.1 * recur(self, x, *rest))
    for family in ("norm", "attention", "latent attention", "recurrence"):
        assert "are off by" in self_test.examine(family, device).failure
    assert self_test.examine("activation", device).failure is None, "the verdict of a family is its own"


def test_what_a_gpu_does_not_have_is_not_tried(monkeypatch):
    monkeypatch.setattr(configs, "gpu", lambda device: configs.Gpu("default", 108, 80))
    monkeypatch.setitem(self_test.FAMILIES, "fp8 linear", lambda device: pytest.fail("not on this GPU"))
    found = self_test.examine("fp8 linear", torch.device("cpu"))
    assert found.failure == "Triton's fp8 linear kernels need a GPU of compute capability 8.9" and not found.details


def test_a_family_that_raises_has_its_traceback(device, monkeypatch):
    def broken(device: torch.device) -> float:
        raise RuntimeError("ptxas: no such instruction\nmore")

    monkeypatch.setitem(self_test.FAMILIES, "norm", broken)
    found = self_test.examine("norm", device)
    assert found.failure == "Triton's norm kernels fail on this GPU: RuntimeError: ptxas: no such instruction"
    assert "in broken" in found.details
