"""FP8 checkpoints of every publisher: read as they are meant, computed as their publishers compute, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import ScoringModel
from aiakq.formats import fp8, quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.inspect.inspection import inspect_checkpoint
from tests.fp8_files import (
    Published,
    expected_logits,
    in_blocks,
    per_group,
    per_row,
    per_tensor,
    per_token,
    publish,
    static,
)


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, **weights},
        "input_activations": inputs and {**common, **inputs},
        "format": "float-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {**common, "strategy": "tensor", "dynamic": False},
    }


TOKEN = {"strategy": "token", "dynamic": True}
PUBLISHED = {
    "deepseek": Published(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 32]},
        lambda w: in_blocks(w, 48, 32, "weight_scale_inv"),
        lambda x: per_group(x, 32),
    ),
    "deepseek-ue8m0": Published(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        lambda w: in_blocks(w, 128, 128, "weight_scale_inv"),
        lambda x: per_group(x, 128, powers=True),
    ),
    "qwen": Published(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
            "weight_block_size": [128, 128],
        },
        lambda w: in_blocks(w, 128, 128, "weight_scale_inv", torch.bfloat16),
        lambda x: per_group(x, 128),
    ),
    "autofp8-static": Published(
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
        },
        lambda w: per_tensor(w, input_scale=0.013),
        lambda x: static(x, 0.013),
        {
            "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
            "model.layers.0.self_attn.v_proj.output_scale": torch.ones(1),
        },
    ),
    "autofp8-dynamic": Published({"quant_method": "fp8", "activation_scheme": "dynamic"}, per_tensor, per_token),
    "mistral": Published(
        {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None},
        lambda w: per_tensor(w, "weight_scale_inv", activation_scale=0.02),
        lambda x: static(x, 0.02),
    ),
    "fbgemm": Published(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.5, "modules_to_not_convert": ["lm_head"]},
        per_row,
        lambda x: per_token(x, 2.5, 1 / (448 * 512)),
    ),
    "modelopt": Published(
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.39.0"},
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}},
        },
        lambda w: per_tensor(w, input_scale=0.01),
        lambda x: static(x, 0.01),
    ),
    "modelopt-rows": Published(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]},
        lambda w: per_row(w, shape=(-1,)),
        per_token,
    ),
    "modelopt-blocks": Published(
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "ignore": ["lm_head"]},
        lambda w: in_blocks(w, 128, 128, "weight_scale"),
    ),
    "lc-channel": Published(compressed({"strategy": "channel"}, TOKEN), per_row, per_token),
    "lc-tensor": Published(compressed({"strategy": "tensor"}, TOKEN), per_tensor, per_token),
    "lc-static": Published(
        compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
        lambda w: per_tensor(w, input_scale=0.01),
        lambda x: static(x, 0.01),
    ),
    "lc-block": Published(
        compressed(
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
        lambda w: in_blocks(w, 128, 128, "weight_scale"),
        lambda x: per_group(x, 128),
    ),
    "lc-group": Published(
        compressed({"strategy": "group", "group_size": 32}, None), lambda w: in_blocks(w, 1, 32, "weight_scale")
    ),
}
#: Prompts of two tokens, none of which occurs twice.
IDS = torch.arange(65, 81).view(8, 2)


def served_logits(folder: Path, impl: str = "aiakq", **options: Any) -> torch.Tensor:
    exact = {"dtype": "float32", "device": "cpu", "cpu_math": "exact"}
    config = EngineConfig.from_args({"model": str(folder), "model_impl": impl} | exact | options)
    return ScoringModel(load_model(config)[0], config).logits(IDS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_log_probabilities_are_those_of_the_publisher(name, tiny_model, tmp_path):
    """But for a prompt at most: float sums differ in their last bits, so that an activation in the middle between two
    e4m3 may be rounded to the other one.
    """
    published = PUBLISHED[name]
    model = tiny_model("LlamaForCausalLM")
    dense = publish(model, tmp_path / "model", published)
    wanted = expected_logits(model, dense, published, IDS).log_softmax(-1)
    found = served_logits(tmp_path / "model").log_softmax(-1)
    away = (found - wanted).abs().amax((1, 2))
    assert (away < 1e-5).sum() >= (len(IDS) if published.rounded is None else len(IDS) - 1)


@pytest.mark.parametrize("name", ["lc-group", "modelopt-blocks"])
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Phi3ForCausalLM"])
def test_experts_latents_and_fused_projections_are_those_of_the_dequantized_model(
    architecture, name, tiny_model, tmp_path
):
    model = tiny_model(architecture)
    dense = publish(model, tmp_path / "model", PUBLISHED[name])
    quantized = Checkpoint.open(tmp_path / "model").quantized_linears()
    assert len(quantized) >= 8 and ("Moe" not in architecture or any(".experts." in each for each in quantized))
    shutil.copytree(model, tmp_path / "dense")
    save_file({key: each.contiguous() for key, each in dense.items()}, tmp_path / "dense/model.safetensors")
    found, wanted = (served_logits(tmp_path / folder).log_softmax(-1) for folder in ("model", "dense"))
    assert (found - wanted).abs().max() < 3e-5


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_remain_8_bits_in_memory(name, tiny_model, tmp_path):
    published = PUBLISHED[name]
    dense = publish(tiny_model("LlamaForCausalLM"), tmp_path / "model", published)
    checkpoint = Checkpoint.open(tmp_path / "model")
    for linear in checkpoint.quantized_linears():
        weight = checkpoint.read_linear(linear)
        assert weight.codes.dtype == torch.uint8
        assert weight.scheme == ("fp8a16" if published.rounded is None else "fp8a8")
        assert torch.equal(dequantize(weight), dense[f"{linear}.weight"])


def test_modelopt_may_have_a_config_of_its_own(tiny_model, tmp_path):
    published = PUBLISHED["modelopt"]
    publish(tiny_model("LlamaForCausalLM"), tmp_path / "model", published)
    config = json.loads((tmp_path / "model/config.json").read_text())
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.vision*"]}
    own = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner}
    wanted = served_logits(tmp_path / "model")
    del config["quantization_config"]
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/hf_quant_config.json").write_text(json.dumps(own))
    assert torch.equal(served_logits(tmp_path / "model"), wanted)
    own["quantization"]["quant_algo"] = "W4A4_AWQ"
    (tmp_path / "model/hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(AiakqError, match="quant_algo 'W4A4_AWQ'; read are FP8, "):
        served_logits(tmp_path / "model")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "fp8", "activation_scheme": "per_tensor"}, "activation_scheme 'per_tensor'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
        ({"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"}, "static activations"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "format 'e5m2'"),
        ({"quant_method": "fp8", "scale_fmt": "log2"}, "scale_fmt 'log2'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "'fp4'"),
        ({"quant_method": "fp8", "rotation": "hadamard"}, "'rotation' ('hadamard')"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "activation_scale_ub -1"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "quant_algo 'NVFP4_SVD'"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "has_zero_point": True}},
            "'has_zero_point'",
        ),
        (compressed({"strategy": "attn_head"}, None), "strategy 'attn_head'"),
        (compressed({"strategy": "block"}, None), "block_structure None"),
        (compressed({"strategy": "channel", "symmetric": False}, None), "asymmetric"),
        (compressed({"strategy": "channel", "num_bits": 6}, None), "6 bits"),
        (compressed({"strategy": "channel"}, {"strategy": "tensor", "dynamic": True}), "computed scales"),
        (compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": False}), "stored scales"),
        (compressed({"strategy": "channel"}, {**TOKEN, "type": "int"}), "type 'int'"),
        (compressed({"strategy": "channel"}, {**TOKEN, "scale_dtype": "torch.float8_e4m3fn"}), "scales rounded to"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_a_config_says_otherwise_is_refused_by_name(config, said):
    with pytest.raises(AiakqError) as caught:
        quantization_config.read(config)
    assert caught.value.id == "format_unsupported" and said in str(caught.value)


def poke(value: float, index: int = 0) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.reshape(-1).clone()
        flat[index] = torch.tensor(value).to(flat.dtype)
        return flat.view(tensor.shape)

    return change


@pytest.mark.parametrize(
    ("suffix", "change", "id"),
    [
        ("weight", poke(float("nan")), "not_finite"),
        ("weight", lambda t: t.float(), "tensor_mismatch"),
        ("weight", lambda t: t[:, :0], "tensor_mismatch"),
        ("weight", lambda t: t[0], "tensor_mismatch"),
        ("weight_scale_inv", poke(float("nan")), "not_finite"),
        ("weight_scale_inv", poke(float("inf")), "not_finite"),
        ("weight_scale_inv", poke(0.0), "tensor_mismatch"),
        ("weight_scale_inv", lambda t: t[:, :-1], "tensor_mismatch"),
        ("weight_scale_inv", lambda t: t[:0], "tensor_mismatch"),
        ("weight_scale_inv", lambda t: t.to(torch.int32), "tensor_mismatch"),
        ("weight_scale_inv", None, "tensor_mismatch"),
    ],
)
def test_damage_is_refused_by_name(suffix, change, id):
    spec = quantization_config.read(PUBLISHED["deepseek"].config)
    tensors, _ = in_blocks(torch.randn(100, 70, generator=torch.Generator().manual_seed(0)), 48, 32, "weight_scale_inv")
    if change is None:
        del tensors[suffix]
    else:
        tensors[suffix] = change(tensors[suffix])
    with pytest.raises(AiakqError) as caught:
        fp8.read(tensors, spec, "model.layers.3.q_proj")
    assert caught.value.id == id and "model.layers.3.q_proj." in str(caught.value)


@pytest.mark.parametrize("scale", [float("nan"), 0.0, -1.0])
def test_a_damaged_scale_of_activations_is_refused_by_name(scale):
    spec = quantization_config.read(PUBLISHED["autofp8-static"].config)
    tensors, _ = per_tensor(torch.ones(8, 8), input_scale=scale)
    with pytest.raises(AiakqError, match=r"layer\.input_scale"):
        fp8.read(tensors, spec, "layer")
    del tensors["input_scale"]
    with pytest.raises(AiakqError, match="input_scale is missing"):
        fp8.read(tensors, spec, "layer")


@pytest.mark.parametrize("suffixes", [("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale")])
def test_two_scales_for_the_same_values_are_refused(suffixes):
    spec = quantization_config.read(PUBLISHED["autofp8-static"].config)
    tensors, _ = per_tensor(torch.ones(8, 8), input_scale=0.5)
    tensors |= dict.fromkeys(suffixes, torch.tensor([0.25]))
    with pytest.raises(AiakqError, match="which say the same") as caught:
        fp8.read(tensors, spec, "layer")
    assert caught.value.id == "tensor_mismatch"


def test_negative_scales_and_scales_in_e8m0_are_numbers():
    spec = quantization_config.read(PUBLISHED["deepseek"].config)
    tensors, _ = in_blocks(torch.ones(48, 64), 48, 32, "weight_scale_inv")
    tensors["weight_scale_inv"] = torch.tensor([[-0.5, 2.0]])
    weight = fp8.read(tensors, spec)
    assert dequantize(weight)[0, [0, 32]].tolist() == [-224.0, 896.0]
    tensors["weight_scale_inv"] = torch.tensor([[126, 0]], dtype=torch.uint8)
    assert dequantize(fp8.read(tensors, spec))[0, [0, 32]].tolist() == [224.0, 448 * 2.0**-127]
    tensors["weight_scale_inv"] = torch.tensor([[126, 255]], dtype=torch.uint8)
    with pytest.raises(AiakqError) as caught:
        fp8.read(tensors, spec)
    assert caught.value.id == "not_finite"


def test_e5m2_codes_are_read():
    spec = quantization_config.read(PUBLISHED["lc-channel"].config)
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(torch.float8_e5m2)
    tensors = {"weight": weight, "weight_scale": torch.full((8, 1), 0.5)}
    assert torch.equal(dequantize(fp8.read(tensors, spec)), weight.float() * 0.5)
    tensors["weight"] = torch.full_like(weight.float(), float("inf")).to(torch.float8_e5m2)
    with pytest.raises(AiakqError) as caught:
        fp8.read(tensors, spec)
    assert caught.value.id == "not_finite"


def test_floats_that_the_config_calls_integers_are_refused():
    spec = quantization_config.read({"quant_method": "gptq", "bits": 4, "group_size": 32})
    tensors, _ = per_row(torch.ones(8, 8))
    with pytest.raises(AiakqError, match="the config says that they are integers"):
        fp8.read(tensors, spec)


@pytest.mark.parametrize(
    "name",
    ["deepseek", "deepseek-ue8m0", "autofp8-static", "autofp8-dynamic", "fbgemm", "lc-block", "lc-group", "lc-static"],
)
def test_a_config_that_is_written_means_the_same(name):
    spec = quantization_config.read(PUBLISHED[name].config)
    again = quantization_config.read(json.loads(json.dumps(quantization_config.write(spec))))
    assert (again.layer, again.format) == (spec.layer, spec.format)


@pytest.mark.parametrize("quantization", ["fp8", "FP8"])
def test_quantization_may_be_named(quantization, tiny_model, tmp_path):
    publish(tiny_model("LlamaForCausalLM"), tmp_path / "model", PUBLISHED["deepseek"])
    assert EngineConfig.from_args({"model": str(tmp_path / "model"), "quantization": quantization}).spec is not None
    with pytest.raises(AiakqError) as caught:
        EngineConfig.from_args({"model": str(tmp_path / "model"), "quantization": "gptq"})
    assert caught.value.id == "quantization_mismatch"


@pytest.mark.parametrize("name", ["fbgemm", "modelopt"])
def test_quantization_may_be_the_name_of_another_tool(name, tiny_model, tmp_path):
    publish(tiny_model("LlamaForCausalLM"), tmp_path / "model", PUBLISHED[name])
    given = {"model": str(tmp_path / "model"), "quantization": PUBLISHED[name].config["quant_method"]}
    assert EngineConfig.from_args(given).spec is not None


def test_inspect_describes_the_layers(tiny_model, tmp_path):
    publish(tiny_model("LlamaForCausalLM"), tmp_path / "model", PUBLISHED["autofp8-static"])
    report = inspect_checkpoint(str(tmp_path / "model"), device="cpu")
    schemes = {layer.name: layer.scheme for layer in report.layers}
    assert schemes["model.layers.0.mlp.down_proj"] == "fp8a8" and schemes["lm_head"] != "fp8a8"
    assert not report.differences and len(report.left_out) == 2
    document = json.loads(json.dumps(report.document()))
    assert document["quantization"]["scheme"] == "fp8a8" and document["quantization"]["format"] == "fp8"


def test_a_scale_of_another_shape_is_in_the_table_of_differences(tiny_model, tmp_path):
    published = PUBLISHED["deepseek"]

    def store(weight: torch.Tensor) -> Any:
        tensors, dense = published.store(weight)
        return {**tensors, "weight_scale_inv": tensors["weight_scale_inv"][:1]}, dense

    publish(tiny_model("LlamaForCausalLM"), tmp_path / "model", Published(published.config, store))
    with pytest.raises(AiakqError, match=r"weight_scale_inv") as caught:
        served_logits(tmp_path / "model")
    assert caught.value.id == "tensor_inventory"


def test_random_weights_have_the_scheme_of_the_config(tiny_model, tmp_path):
    for name in ("deepseek", "autofp8-static", "lc-channel"):
        publish(tiny_model("LlamaForCausalLM"), tmp_path / name, PUBLISHED[name])
        assert served_logits(tmp_path / name, load_format="dummy").isfinite().all()
