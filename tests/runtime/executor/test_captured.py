"""Which models' steps are captured."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import torch

from aiakq import LLM, SamplingParams
from aiakq.kernels.ops import dense
from aiakq.kernels.ops.linear import LinearLayer


class NumpyLinear(LinearLayer):
    """A kernel that torch does not see at work, like those of an extension module."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight.float().numpy(), bias

    def __call__(self, x):
        y = torch.empty(len(x), len(self.weight))
        for row, result in zip(x.numpy(), y.numpy(), strict=True):
            result[:] = self.weight @ row
        return y if self.bias is None else y + self.bias


def supports(problem):
    return None


def prepare(weight, bias, problem):
    return NumpyLinear(weight, bias)


def test_a_step_with_a_kernel_of_another_package_is_not_recorded(tiny_model, monkeypatch):
    folder = str(tiny_model("LlamaForCausalLM"))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens() -> list[int]:
        llm = LLM(folder, dtype="float32", num_gpu_blocks_override=65)
        return llm.generate([{"prompt_token_ids": [5, 9, 40]}], params, use_tqdm=False)[0].outputs[0].token_ids

    expected = tokens()
    plugin = EntryPoint("numpy", "numpy_kernel", "aiakq.implementations.dense")
    monkeypatch.setattr(dense.IMPLEMENTATIONS, "_plugins", {"numpy": plugin})
    monkeypatch.setitem(sys.modules, "numpy_kernel", sys.modules[__name__])
    assert tokens() == expected
