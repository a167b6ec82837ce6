"""What kernels are asked to compute is the same from headers as from the weights, and decides what is decoded."""

from __future__ import annotations

import pytest
import torch
from checkpoint_copies import with_mxfp4_experts

from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops import Ops
from aiakq.kernels.selection import BACKENDS
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.loader.opening import open_weights
from aiakq.runtime.loader.stored_problem import stacked_problem, stacks, stored_problem

CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ["mxfp4", "nvfp4", "fp8"])
def test_problems_from_headers_are_those_of_the_weights(method, tiny_model, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(QuantizeOptions(str(tiny_model("LlamaForCausalLM")), str(out), method, evaluate=False))
    checkpoint, ops = Checkpoint.open(out), Ops(CPU, torch.bfloat16)
    names = checkpoint.quantized_linears()
    assert names
    for name in names:
        weight = checkpoint.read_linear(name)
        assert stored_problem(checkpoint, name, ops) == weight.problem(torch.bfloat16, "cpu")


def test_problems_of_stacked_experts_are_those_of_the_weights(tiny_model, tmp_path):
    folder = with_mxfp4_experts(tiny_model("GptOssForCausalLM"), tmp_path / "codes")
    config = EngineConfig.from_args({"model": str(folder), "device": "cpu", "dtype": "bfloat16"})
    weights = open_weights(config)
    asked = []
    weights.ops._linear = lambda weight, *rest: asked.append(weight.problem(torch.bfloat16, "cpu"))
    from aiakq.runtime.models.gpt_oss import GptOssBuilder

    builder = GptOssBuilder(config.model, weights)
    builder.ops.experts = lambda *given: None
    builder.mlp(0)
    problems = [stacked_problem(experts, weights.ops) for experts in stacks(weights.checkpoint)]
    assert asked and set(asked) == set(problems)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_experts_in_4_bits_are_decoded_only_without_a_kernel(dtype, tiny_model, tmp_path, monkeypatch):
    """Triton's kernels have none for activations in float32."""
    pytest.importorskip("triton")
    folder = with_mxfp4_experts(tiny_model("GptOssForCausalLM"), tmp_path / "codes")
    monkeypatch.setitem(BACKENDS, "cpu", BACKENDS["cuda"])
    monkeypatch.setenv("AIAKQ_KERNELS", "triton,triton-floats")
    weights = open_weights(EngineConfig.from_args({"model": str(folder), "device": "cpu", "dtype": dtype}))
    decoded = [remark for remark in weights.remarks if "small floats are decoded" in remark]
    assert bool(decoded) == (dtype == "float32")
