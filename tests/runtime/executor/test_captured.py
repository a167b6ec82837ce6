"""Models whose steps are captured, and the reasons why others are not."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import torch

from aiakq import LLM, SamplingParams
from aiakq.kernels.ops import dense
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.runtime.executor.captured import capture_step
from aiakq.runtime.executor.cpu_program import Bounds


class NumpyLinear(LinearLayer):
    """A kernel whose computation is invisible to torch, like one of an extension module."""

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


def test_models_that_do_not_decode_capture_no_graphs(tiny_model, monkeypatch):
    llm = LLM(str(tiny_model("LlamaForCausalLM")), task="embed", dtype="float32", num_gpu_blocks_override=65)
    runner, bounds = llm.engine.executor.runner, Bounds(8, 8, 64)
    with monkeypatch.context() as patched:
        patched.setattr(runner.model.ops, "device", torch.device("cuda"))
        captured, how = capture_step(runner.model, runner.caches, bounds, 16, llm.config.compilation)
    assert captured is None and "does not decode" in how
    assert llm.engine.facts["step"].endswith("operations in one call"), "on a CPU every step is one call"


def test_mixtures_whose_rows_the_host_counts_capture_no_graphs(tiny_model, monkeypatch):
    llm = LLM(str(tiny_model("MixtralForCausalLM")), dtype="float32", num_gpu_blocks_override=65)
    runner, bounds = llm.engine.executor.runner, Bounds(8, 8, 64)
    monkeypatch.setattr(runner.model.ops, "device", torch.device("cuda"))

    def reason() -> str:
        captured, how = capture_step(runner.model, runner.caches, bounds, 16, llm.config.compilation)
        assert captured is None
        return how

    assert "the host reads which experts have rows: experts run one after the other" in reason()
    for block in runner.model.blocks:
        monkeypatch.setattr(type(block.mlp.experts), "host_reason", None)
    assert "attention is implemented by" in reason(), "and nothing else is in the way"
