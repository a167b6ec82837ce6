"""Scales of either sign: every format, kernel and way of serving computes the weights that the codes stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_copies import in_floats, with_signed_scales
from torch import Tensor

from aiakq.evaluation.scoring import ScoringModel
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.selection import VARIABLE
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.spec import QuantSpec

IDS = torch.arange(3, 70)[None]
W8A8 = {"format": "compressed-tensors", "bits": 8, "activation_bits": 8}
#: Name -> family and spec.
CASES = {
    "gptq-w4": ("LlamaForCausalLM", QuantSpec("gptq", "gptq", 4, 32)),
    "gptq-w3": ("LlamaForCausalLM", QuantSpec("gptq", "gptq", 3, 32)),
    "gptq-lm-head": ("LlamaForCausalLM", QuantSpec("gptq", "gptq", 4, 32, ignore=())),
    "gptq-w2": ("LlamaForCausalLM", QuantSpec("gptq", "gptq", 2, 32)),
    "gptq-w8": ("LlamaForCausalLM", QuantSpec("gptq", "gptq", 8)),
    "gptq-asymmetric": ("LlamaForCausalLM", QuantSpec("gptq", "gptq_v2", 4, 32, symmetric=False)),
    "ct-w4": ("LlamaForCausalLM", QuantSpec("gptq", "compressed-tensors", 4, 32)),
    "ct-w3-asymmetric": ("LlamaForCausalLM", QuantSpec("gptq", "compressed-tensors", 3, 32, symmetric=False)),
    "ct-w8": ("LlamaForCausalLM", QuantSpec("weight_only_int8", "compressed-tensors", 8)),
    "awq": ("LlamaForCausalLM", QuantSpec("awq", "awq", 4, 32, symmetric=False)),
    "awq-symmetric": ("LlamaForCausalLM", QuantSpec("awq", "awq", 4, 32)),
    "awq-gemv": ("LlamaForCausalLM", QuantSpec("awq", "awq_gemv", 4, 32, symmetric=False)),
    "awq-gemv-fast": ("LlamaForCausalLM", QuantSpec("awq", "awq_gemv_fast", 4, 32, symmetric=False)),
    "w8a8": ("LlamaForCausalLM", QuantSpec("smooth_quant", **W8A8)),
    "w8a8-static": ("LlamaForCausalLM", QuantSpec("smooth_quant", **W8A8, static_input=True)),
    "experts-w4": ("Qwen2MoeForCausalLM", QuantSpec("gptq", "compressed-tensors", 4, 32)),
    "experts-w8a8": ("MixtralForCausalLM", QuantSpec("smooth_quant", **W8A8)),
}


def logits(folder: Path, **arguments: Any) -> Tensor:
    config = EngineConfig.from_args({"model": str(folder), "device": "cpu", "dtype": "float32", **arguments})
    return ScoringModel(load_model(config)[0], config).logits(IDS)[0]


def away(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_weights(case, tiny_model, tmp_path, monkeypatch):
    """With every implementation of the products on a CPU, exact or with rounded activations."""
    family, spec = CASES[case]
    folder = with_signed_scales(tiny_model(family, intermediate_size=192), tmp_path / "signed", spec)
    checkpoint = Checkpoint.open(folder)
    assert ("lm_head" in checkpoint.quantized_linears()) == ("lm_head" not in spec.ignore)
    linears = [checkpoint.read_linear(name) for name in checkpoint.quantized_linears()]
    assert 0.4 < (torch.cat([each.scales.flatten() for each in linears]) < 0).float().mean() < 0.6
    wanted = logits(in_floats(folder, tmp_path / "floats"))
    found = {
        "exact": logits(folder, cpu_math="exact", dequantize="never"),
        "fast": logits(folder, cpu_math="fast", dequantize="never"),
    }
    if not spec.activation_bits:
        found["dequantized"] = logits(folder, dequantize="always")
    monkeypatch.setenv(VARIABLE, "reference")
    found["reference"] = logits(folder, dequantize="never")
    for name, each in found.items():
        if spec.activation_bits:
            # Rounded activations take the logits of random models far from those of floats.
            assert away(each, found["reference"]) < 1e-3 and away(each, wanted) < 0.3, name
        else:
            assert away(each, wanted) < (0.1 if name == "fast" else 2e-5), name
