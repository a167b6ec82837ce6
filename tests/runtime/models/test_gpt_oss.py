"""GPT-OSS: experts in MXFP4 are those floats that transformers makes of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_copies import packed_mxfp4 as packed
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import ScoringModel
from aiakq.formats import mxfp4
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.inspect.inspection import inspect_checkpoint


def of_transformers(blocks: Tensor, scales: Tensor) -> Tensor:
    """[E, K, N] float32, as its model holds them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


def logits(folder: Path) -> Tensor:
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(3))
    config = EngineConfig.from_args({"model": str(folder), "dtype": "float32", "device": "cpu", "cpu_math": "exact"})
    return ScoringModel(load_model(config)[0], config).logits(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_floats_of_transformers(dtype):
    blocks, scales = packed(2, 8, 96)
    rows = torch.randperm(8)
    weights = list(mxfp4.read_experts(blocks, scales, torch.zeros(2, 8), "experts", rows))
    assert [weight.scheme for weight in weights] == ["lut4a16", "lut4a16"]
    for weight, floats in zip(weights, of_transformers(blocks, scales), strict=True):
        assert torch.equal(dequantize(weight, dtype), floats.T[rows].to(dtype))


def test_scales_that_are_nan_are_refused():
    blocks, scales = packed(1, 4, 64)
    scales[0, 2, 1] = 255
    with pytest.raises(AiakqError, match="experts") as caught:
        list(mxfp4.read_experts(blocks, scales, torch.zeros(1, 4), "experts", None))
    assert caught.value.id == "not_finite"


def test_experts_in_mxfp4_give_the_logits_of_their_floats(tiny_model, tmp_path):
    source = tiny_model("GptOssForCausalLM")
    floats = load_file(source / "model.safetensors")
    codes = dict(floats)
    for name in [name for name in floats if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        count, k, n = floats[name].shape
        blocks, scales = packed(count, n, k)
        floats[name] = of_transformers(blocks, scales).contiguous()
        del codes[name]
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folders = []
    for label, tensors in (("floats", floats), ("codes", codes)):
        folders.append(tmp_path / label)
        shutil.copytree(source, folders[-1])
        save_file(tensors, folders[-1] / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folders[1] / "config.json").write_text(json.dumps(config))
    floats_found, found = map(logits, folders)
    assert (found - floats_found).norm() / floats_found.norm() < 1e-5
    assert inspect_checkpoint(str(folders[1]), device="cpu").differences == ()


def test_another_clamp_is_refused(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("GptOssForCausalLM"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "swiglu_limit": 5.0}))
    with pytest.raises(AiakqError, match=r"of this kind \(its SwiGLU has the limit 5.0 .* is not supported"):
        logits(folder)
