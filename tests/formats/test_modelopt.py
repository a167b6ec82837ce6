"""Configs of NVIDIA ModelOpt: names of algorithms, models of several, and the 4-bit integers of its AWQ."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import ScoringModel
from aiakq.formats import modelopt, quantization_config, unread_formats
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.safetensors_file import TensorInfo
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from tests.fp4_files import modelopt_nvfp4, mxfp8, of_modelopt
from tests.fp8_files import per_tensor


def test_layers_of_modelopt_may_have_algorithms_of_their_own(tiny_model, tmp_path):
    """Two kinds of numbers in a model, and layers that are in neither list."""
    model = tiny_model("LlamaForCausalLM")
    kinds = {"self_attn.q_proj": "FP8", "mlp.up_proj": "W4A16_NVFP4", "mlp.down_proj": "MXFP8"}
    listed, stored = {}, {}
    for name, tensor in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        kind = next((kinds[each] for each in kinds if module.endswith(each)), None)
        if kind is None:
            stored[name] = tensor
            continue
        made = {"FP8": lambda w: per_tensor(w, input_scale=0.01), "MXFP8": mxfp8, "W4A16_NVFP4": modelopt_nvfp4}
        parts, _ = made[kind](tensor.float())
        stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        listed[module] = {"quant_algo": kind} | ({"group_size": 16} if "NVFP4" in kind else {})
    shutil.copytree(model, tmp_path / "model")
    save_file(stored, tmp_path / "model/model.safetensors")
    own = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": listed},
    }
    (tmp_path / "model/hf_quant_config.json").write_text(json.dumps(own))
    checkpoint = Checkpoint.open(tmp_path / "model")
    schemes = {name.rpartition(".")[2]: checkpoint.read_linear(name).scheme for name in checkpoint.quantized_linears()}
    assert schemes == {"q_proj": "fp8a8", "up_proj": "lut4a16", "down_proj": "fp8a8"}
    config = EngineConfig.from_args({"model": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"})
    assert ScoringModel(load_model(config)[0], config).logits(torch.arange(8)[None]).isfinite().all()
    listed["model.layers.0.mlp.up_proj"]["quant_algo"] = "NVFP4_SVD"
    (tmp_path / "model/hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(AiakqError, match="'NVFP4_SVD'"):
        _ = Checkpoint.open(tmp_path / "model").spec


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4", "modelopt_mixed"])
def test_vllms_names_of_modelopt_are_read(method):
    spec = quantization_config.read({**of_modelopt("NVFP4", 16), "quant_method": method})
    assert spec.describe() == "lut4a4 g16 e2m1 e4m3" and spec.format == "modelopt"


def test_mxfp4_of_modelopt_whose_groups_say_that_activations_are_not_rounded_is_read():
    config = of_modelopt("MXFP4", 32, config_groups={"group_0": {"weights": {"num_bits": 4, "group_size": 32}}})
    assert quantization_config.read(config).describe() == "lut4a16 g32 e2m1 e8m0"


def integers() -> dict[str, torch.Tensor]:
    """Packed as ModelOpt packs them: two outputs in a byte."""
    codes = torch.randint(-8, 8, (6, 256), generator=torch.Generator().manual_seed(2))
    packed = (codes[::2] & 15) | ((codes[1::2] & 15) << 4)
    stored = {"weight": packed.to(torch.uint8), "weight_scale": torch.arange(1.0, 13).view(6, 2) / 64}
    return {**stored, "pre_quant_scale": torch.linspace(0.5, 2, 256), "codes": codes}


def test_integers_share_bytes_along_outputs():
    tensors = integers()
    codes = tensors.pop("codes")
    weight = modelopt.read(tensors, quantization_config.read(of_modelopt("W4A16_AWQ", 128)))
    assert weight.scheme == "w4a16" and weight.group_size == 128 and weight.factors is not None
    dense = dequantize(replace(weight, factors=None))
    assert torch.equal(dense, codes * tensors["weight_scale"].repeat_interleave(128, 1))
    numbers = {"weight_scale_2": torch.tensor(0.002), "input_scale": torch.tensor(0.1)}
    twice = modelopt.read({**tensors, **numbers}, quantization_config.read(of_modelopt("W4A8_AWQ", 128)))
    rounded = (dense / 0.002).clamp(-448, 448).to(torch.float8_e4m3fn).float() * torch.tensor(0.002)
    assert twice.scheme == "fp8a8" and torch.equal(dequantize(replace(twice, factors=None)), rounded)


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        ({"weight": torch.zeros(3, 256)}, "tensor_mismatch"),
        ({"weight": torch.zeros(3, 255, dtype=torch.uint8)}, "tensor_mismatch"),
        ({"weight_scale": torch.ones(3, 2)}, "tensor_mismatch"),
        ({"weight_scale": torch.ones(6, 3)}, "tensor_mismatch"),
        ({"weight_scale": torch.zeros(6, 2)}, "tensor_mismatch"),
        ({"weight_scale": torch.ones(6, 2).to(torch.float8_e4m3fn)}, "tensor_mismatch"),
        ({"weight_scale": torch.full((6, 2), torch.nan)}, "not_finite"),
        ({"weight_scale_2": torch.tensor(0.0)}, "tensor_mismatch"),
        ({"weight_scale_2": torch.ones(2)}, "tensor_mismatch"),
        ({"input_scale": torch.tensor(torch.inf)}, "not_finite"),
        ({"pre_quant_scale": torch.ones(1, 256)}, "tensor_mismatch"),
        ({"pre_quant_scale": -torch.ones(256)}, "tensor_mismatch"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_damaged_integers_are_refused(changes, id):
    tensors = {**integers(), "weight_scale_2": torch.tensor(0.002), "input_scale": torch.tensor(0.1), **changes}
    del tensors["codes"]
    with pytest.raises(AiakqError) as caught:
        modelopt.read(tensors, quantization_config.read(of_modelopt("W4A8_AWQ", 128)), "up")
    assert caught.value.id == id and "up." in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("up.pre_quant_scale", "F8_E4M3"), ("up.gate_pre_quant_scale", "U8"), ("up.svdquant_lora_a", "U8")],
)
def test_factors_that_no_reader_applies_are_refused(name, dtype):
    inventory = {"up.weight": TensorInfo(dtype, (4, 4), "f"), name: TensorInfo("F32", (4,), "f")}
    said = unread_formats.of_tensors(inventory)
    assert said is not None and said.startswith("NVIDIA ModelOpt with") and name in said


@pytest.mark.parametrize("group", [64, 128])
def test_a_config_of_an_algorithm_that_is_only_read_is_not_written(group):
    spec = quantization_config.read(of_modelopt("W4A16_AWQ", group))
    with pytest.raises(AiakqError, match="such files have one of FP8, "):
        quantization_config.write(spec)
