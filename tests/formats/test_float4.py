"""MXFP4, MXFP8 and NVFP4 of every publisher: read as they are meant, computed as they compute, or refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import ScoringModel
from aiakq.formats import compressed_tensors, modelopt, quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.inspect.inspection import inspect_checkpoint
from aiakq.spec import QuantSpec
from tests.fp4_files import (
    modelopt_nvfp4,
    modelopt_nvfp4_rounded,
    mx_rounded,
    mxfp4,
    mxfp8,
    nvfp4,
    nvfp4_rounded,
    of_modelopt,
)
from tests.fp8_files import Published, expected_logits, publish, static

NV = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    common = {"type": "float", "symmetric": True, "zp_dtype": None, "actorder": None}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, **weights},
        "input_activations": inputs and {**common, **inputs},
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FOUR = {"num_bits": 4}
EIGHT = {"num_bits": 8}
LOCAL = {**FOUR, **NV, "dynamic": "local"}
OLD = {"strategy": "tensor_group", "group_size": 16}
CACHE = {
    "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
    "model.layers.0.self_attn.v_proj.v_scale": torch.ones(1),
}
UNIT = 0.004


def factors(k: int) -> Tensor:
    """What inputs are multiplied by: the pre_quant_scale [K] of ModelOpt's NVFP4_AWQ."""
    return torch.linspace(0.5, 2.0, k)


def awq(weight: Tensor) -> Any:
    stored, dense = modelopt_nvfp4(weight / factors(weight.shape[1]), UNIT)
    return {**stored, "pre_quant_scale": factors(weight.shape[1])}, dense


PUBLISHED = {
    "nvfp4": Published(
        compressed("nvfp4-pack-quantized", {**FOUR, **NV}, LOCAL),
        lambda w: nvfp4(w, 300.0),
        lambda x: nvfp4_rounded(x, 300.0),
        CACHE,
    ),
    "nvfp4-old": Published(
        compressed("nvfp4-pack-quantized", {**FOUR, **OLD}, {**FOUR, **OLD, "dynamic": "local"}),
        lambda w: nvfp4(w, 50.0),
        lambda x: nvfp4_rounded(x, 50.0),
    ),
    "nvfp4a16": Published(compressed("nvfp4-pack-quantized", {**FOUR, **NV}, None), nvfp4),
    "mxfp4": Published(
        compressed("mxfp4-pack-quantized", {**FOUR, **MX}, {**FOUR, **MX, "dynamic": True}),
        mxfp4,
        lambda x: mx_rounded(x, 4),
    ),
    "mxfp4a8": Published(
        compressed("mxfp4-pack-quantized", {**FOUR, **MX}, {**EIGHT, **MX, "dynamic": True}),
        mxfp4,
        lambda x: mx_rounded(x, 8),
    ),
    "mxfp4a16": Published(compressed("mxfp4-pack-quantized", {**FOUR, **MX}, None), mxfp4),
    "mxfp8": Published(
        compressed("mxfp8-quantized", {**EIGHT, **MX}, {**EIGHT, **MX, "dynamic": True}),
        mxfp8,
        lambda x: mx_rounded(x, 8),
    ),
    "mxfp8a16": Published(compressed("mxfp8-quantized", {**EIGHT, **MX}, None), mxfp8),
    "modelopt": Published(
        of_modelopt("NVFP4", 16, config_groups={"group_0": {"weights": FOUR, "input_activations": FOUR}}),
        lambda w: modelopt_nvfp4(w, UNIT),
        lambda x: modelopt_nvfp4_rounded(x, UNIT),
        CACHE,
    ),
    "modelopt-awq": Published(
        of_modelopt("NVFP4_AWQ", 16, has_zero_point=False, pre_quant_scale=True),
        awq,
        lambda x: modelopt_nvfp4_rounded(x * factors(x.shape[-1]), UNIT),
    ),
    "modelopt-mxfp4a16": Published(of_modelopt("W4A16_MXFP4", 32), lambda w: mxfp4(w, "weight")),
    "modelopt-a16": Published(of_modelopt("W4A16_NVFP4", 16), modelopt_nvfp4),
    "modelopt-mxfp4": Published(
        of_modelopt("W4A8_MXFP4_FP8", 32),
        lambda w: mxfp4(w, "weight", input_scale=torch.tensor(0.02)),
        lambda x: static(x, 0.02),
    ),
    "modelopt-mxfp8": Published(
        of_modelopt("MXFP8", 32), lambda w: mxfp8(w, up=True), lambda x: mx_rounded(x, 8, up=True)
    ),
}
SCHEMES = {
    **dict.fromkeys(("nvfp4", "nvfp4-old", "mxfp4", "modelopt", "modelopt-awq"), "lut4a4"),
    **dict.fromkeys(("mxfp4a8", "modelopt-mxfp4"), "lut4a8"),
    **dict.fromkeys(("nvfp4a16", "mxfp4a16", "modelopt-mxfp4a16", "modelopt-a16"), "lut4a16"),
    **{"mxfp8": "fp8a8", "modelopt-mxfp8": "fp8a8", "mxfp8a16": "fp8a16"},
}
#: Prompts of two tokens, none of which occurs twice.
IDS = torch.arange(65, 81).view(8, 2)


def served_logits(folder: Path, **options: Any) -> Tensor:
    exact = {"dtype": "float32", "device": "cpu", "cpu_math": "exact"}
    config = EngineConfig.from_args({"model": str(folder)} | exact | options)
    return ScoringModel(load_model(config)[0], config).logits(IDS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_log_probabilities_are_those_of_the_publisher(name, tiny_model, tmp_path):
    """But for some prompts: float sums differ in their last bits, so that an activation in the middle between two
    numbers may be rounded to the other one, which is far away in 4 bits.
    """
    published = PUBLISHED[name]
    model = tiny_model("LlamaForCausalLM")
    dense = publish(model, tmp_path / "model", published)
    wanted = expected_logits(model, dense, published, IDS).log_softmax(-1)
    away = (served_logits(tmp_path / "model").log_softmax(-1) - wanted).abs().amax((1, 2))
    assert (away < 1e-5).sum() >= (len(IDS) if published.rounded is None else len(IDS) - 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_remain_codes_in_memory(name, tiny_model, tmp_path):
    published = PUBLISHED[name]
    dense = publish(tiny_model("LlamaForCausalLM"), tmp_path / "model", published)
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert len(checkpoint.quantized_linears()) >= 7
    for linear in checkpoint.quantized_linears():
        weight = checkpoint.read_linear(linear)
        assert weight.scheme == SCHEMES[name] == checkpoint.linear_spec(linear).scheme
        assert weight.codes.dtype == torch.uint8 and (weight.table is None or int(weight.codes.max()) < 16)
        assert (weight.factors is None) == (name != "modelopt-awq")
        assert torch.equal(dequantize(replace(weight, factors=None)), dense[f"{linear}.weight"])
        dimensions, group = checkpoint.dimensions(linear)
        assert (dimensions.n, dimensions.k, dimensions.bits, group) == (
            weight.n,
            weight.k,
            weight.bits,
            weight.group_size,
        )


@pytest.mark.parametrize("name", ["nvfp4a16", "mxfp4a16", "modelopt-a16", "mxfp8a16"])
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Phi3ForCausalLM"])
def test_experts_latents_and_fused_projections_are_those_of_the_dequantized_model(
    architecture, name, tiny_model, tmp_path
):
    model = tiny_model(architecture)
    dense = publish(model, tmp_path / "model", PUBLISHED[name])
    shutil.copytree(model, tmp_path / "dense")
    save_file({key: each.contiguous() for key, each in dense.items()}, tmp_path / "dense/model.safetensors")
    found, wanted = (served_logits(tmp_path / folder).log_softmax(-1) for folder in ("model", "dense"))
    assert (found - wanted).abs().max() < 3e-5


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (compressed("nvfp4-pack-quantized", {**FOUR, **MX}, None), "strategy 'group'"),
        (compressed("nvfp4-pack-quantized", {**FOUR, **NV, "group_size": 32}, None), "groups of 32"),
        (compressed("nvfp4-pack-quantized", {**FOUR, **NV, "symmetric": False}, None), "asymmetric"),
        (compressed("nvfp4-pack-quantized", {**FOUR, **NV}, {**LOCAL, "dynamic": True}), "dynamic: True"),
        (compressed("nvfp4-pack-quantized", {**FOUR, **NV}, {**LOCAL, "dynamic": False}), "dynamic: False"),
        (compressed("nvfp4-pack-quantized", {**FOUR, **NV}, {**LOCAL, "num_bits": 8}), "activations of 8 bits"),
        (compressed("nvfp4-pack-quantized", {**FOUR, **NV}, {**LOCAL, "type": "int"}), "type 'int'"),
        (compressed("nvfp4-pack-quantized", {**EIGHT, **NV}, None), "floats of 8 bits in the format"),
        (compressed("mxfp4-pack-quantized", {**FOUR, **NV}, None), "strategy 'tensor_group'"),
        (compressed("mxfp4-pack-quantized", {**FOUR, **MX, "scale_dtype": "torch.int8"}, None), "rounded to 'int8'"),
        (compressed("mxfp4-pack-quantized", {**FOUR, **MX}, {**FOUR, **MX, "dynamic": "local"}), "'local'"),
        (compressed("mxfp4-pack-quantized", {**FOUR, **MX}, {**FOUR, **MX, "dynamic": False}), "dynamic: False"),
        (compressed("mxfp8-quantized", {**EIGHT, **MX, "group_size": 64}, None), "groups of 64"),
        (compressed("mxfp8-quantized", {**EIGHT, **MX}, {**FOUR, **MX, "dynamic": True}), "activations of 4 bits"),
        (compressed("float-quantized", {**FOUR, **NV}, None), "floats of 4 bits in the format"),
        (of_modelopt("NVFP4", 32), "groups of 32, not 16"),
        (of_modelopt("NVFP4_SVD", 16), "quant_algo 'NVFP4_SVD'"),
        (of_modelopt("NVFP4_AWQ", 16, has_zero_point=True), "NVFP4_AWQ and zero points"),
        (of_modelopt("MXFP4", 32), "nothing that says whether activations are rounded; if they are not, change"),
        (of_modelopt("MXFP4", 32, config_groups={"a": {"weights": FOUR, "input_activations": FOUR}}), "rounded activ"),
        (of_modelopt("MIXED_PRECISION", 16, quantized_layers={"a": {"quant_algo": "MXFP4"}}), "nothing that says"),
        (of_modelopt("W4A8_NVFP4_FP8", 16), "'W4A8_NVFP4_FP8'"),
        (of_modelopt("NVFP4", 16, config_groups={"group_0": {"weights": {"num_bits": 8}}}), "weights of 8 bits"),
        (of_modelopt("NVFP4", 16, config_groups={"group_0": {"weights": FOUR | {"group_size": 32}}}), "groups of 32"),
        (of_modelopt("NVFP4", 16, config_groups={"group_0": {"weights": FOUR | {"hadamard": 64}}}), "'hadamard' (64)"),
        (of_modelopt("NVFP4", 16, config_groups={"group_0": {"weights": FOUR | {"strategy": "channel"}}}), "'channel'"),
        (of_modelopt("NVFP4", 16, config_groups={"group_0": {"weights": FOUR, "targets": ["x"]}}), "for 'x'"),
        (of_modelopt("NVFP4", 16, config_groups={"group_0": {"weights": FOUR, "smooth": 1}}), "'smooth' (1)"),
        (of_modelopt("MIXED_PRECISION", 16), "no quantized_layers"),
        (of_modelopt("MIXED_PRECISION", 16, quantized_layers={"a": {"quant_algo": "W8A8_SQ"}}), "'W8A8_SQ'"),
        (
            of_modelopt("MIXED_PRECISION", 16, quantized_layers={"a": {"quant_algo": "NVFP4", "rank": 32}}),
            "entry of 'a' has 'rank' (32)",
        ),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_a_config_says_otherwise_is_refused_by_name(config, said):
    with pytest.raises(AiakqError) as caught:
        quantization_config.read(config)
    assert caught.value.id == "format_unsupported" and said in str(caught.value)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "modelopt-awq"])
def test_a_config_and_tensors_that_are_written_mean_the_same(name):
    """In the format that was read, or in compressed-tensors."""
    spec = quantization_config.read(PUBLISHED[name].config)
    tensors, _ = PUBLISHED[name].store(torch.randn(24, 96, generator=torch.Generator().manual_seed(1)))
    weight = formats.load(spec.format).read(tensors | {"bias": torch.arange(24.0)}, spec)
    for format in sorted({formats.choose(spec), "compressed-tensors"}):
        module = formats.load(format)
        if (reason := module.supports(spec)) is not None:
            assert name in ("modelopt-mxfp4", "modelopt-mxfp8", "modelopt-mxfp4a16")
            assert "rounded" in reason or format == "modelopt"
            continue
        config = module.to_config(spec)
        again = quantization_config.read(json.loads(json.dumps(config)))
        written = module.write(weight, spec, torch.float32)
        other = module.read(written, again)
        # Products of two numbers, where the other format has quotients, may differ in the last bit.
        assert torch.allclose(other.scales.float(), weight.scales.float(), rtol=3e-7, atol=0)
        assert torch.equal(other.codes, weight.codes) and torch.equal(other.bias, weight.bias)
        assert other.scheme == weight.scheme and (other.input_scale is None) == (weight.input_scale is None)
        if format == spec.format:
            assert torch.equal(dequantize(other), dequantize(weight)) and other.rounding == weight.rounding
            assert again.layer == spec.layer and other.input_scale == weight.input_scale
            assert {suffix: tensor.dtype for suffix, tensor in written.items()} == {
                suffix: tensor.dtype for suffix, tensor in (tensors | {"bias": torch.ones(1)}).items()
            }


def test_values_of_codes_are_on_the_device_of_the_codes():
    spec = quantization_config.read(PUBLISHED["mxfp4a16"].config)
    tensors, _ = PUBLISHED["mxfp4a16"].store(torch.randn(24, 96))
    weight = formats.load(spec.format).read({suffix: tensor.to("meta") for suffix, tensor in tensors.items()}, spec)
    assert weight.table.device == weight.codes.device == torch.device("meta")


def test_a_weight_that_is_no_4_bit_float_is_not_written():
    spec = quantization_config.read(PUBLISHED["nvfp4a16"].config)
    weight = compressed_tensors.read(nvfp4(torch.randn(8, 64))[0], spec)
    weight.scales = torch.rand(8, 4) + 1
    with pytest.raises(AiakqError, match="e4m3 numbers times one number"):
        compressed_tensors.write(weight, spec, torch.float32)
    with pytest.raises(AiakqError, match="groups of 16, not of 32"):
        compressed_tensors.write(weight, quantization_config.read(PUBLISHED["mxfp4a16"].config), torch.float32)
    assert "nf4 with other scales" in str(compressed_tensors.supports(QuantSpec("gptq", "", 4, 64, table="nf4")))
    assert compressed_tensors.shape_problem(spec, 8, 40) == "its 40 inputs are no multiple of 16"


# --- damage -----------------------------------------------------------------------------------------------------------


def poke(bits: int, index: int = 0) -> Any:
    def change(tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1).clone().view(torch.uint8)
        flat[index] = bits
        return flat.view(tensor.dtype).view(tensor.shape)

    return change


def number(value: float) -> Any:
    return lambda tensor: torch.full_like(tensor, value)


#: Part of the files, what happens to it, and the error.
DAMAGE = [
    ("weight_scale", None, "tensor_mismatch"),
    ("weight_scale", lambda t: t[:, :-1], "tensor_mismatch"),
    ("weight_scale", lambda t: t[:-1], "tensor_mismatch"),
    ("weight_scale", lambda t: t.reshape(-1), "tensor_mismatch"),
    ("weight_scale", lambda t: t.repeat(1, 2), "tensor_mismatch"),
    ("weight_scale", lambda t: t.to(torch.float32), "tensor_mismatch"),
    ("weight_scale", "nan", "not_finite"),
    ("codes", lambda t: t[:, :0], "tensor_mismatch"),
    ("codes", lambda t: t[0], "tensor_mismatch"),
    ("codes", lambda t: t[:, :-16], "tensor_mismatch"),
    ("unit", None, "tensor_mismatch"),
    ("unit", number(0.0), "tensor_mismatch"),
    ("unit", number(-1.0), "tensor_mismatch"),
    ("unit", number(float("nan")), "not_finite"),
    ("unit", number(float("inf")), "not_finite"),
    ("unit", lambda t: t.repeat(2), "tensor_mismatch"),
    ("unit", lambda t: t.to(torch.int32), "tensor_mismatch"),
    ("unit", "extreme", "not_finite"),
    ("input", None, "tensor_mismatch"),
    ("input", number(0.0), "tensor_mismatch"),
    ("input", number(float("nan")), "not_finite"),
    ("bias", lambda t: t[:-1], "tensor_mismatch"),
    ("pre_quant_scale", number(0.0), "tensor_mismatch"),
    ("pre_quant_scale", number(float("inf")), "not_finite"),
    ("pre_quant_scale", lambda t: t[:-1], "tensor_mismatch"),
    ("pre_quant_scale", lambda t: t.to(torch.int32), "tensor_mismatch"),
]
#: Of the files, who has a number for the whole weight, and for all inputs.
HAVE = {
    "unit": ("nvfp4", "modelopt"),
    "input": ("nvfp4", "modelopt", "modelopt-mxfp4"),
    "pre_quant_scale": ("modelopt-awq",),
}
FILES = ("nvfp4", "mxfp4", "modelopt", "modelopt-mxfp4")


@pytest.mark.parametrize(
    ("name", "suffix", "change", "id"),
    [(name, *row) for row in DAMAGE for name in HAVE.get(row[0], FILES)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_is_refused_by_name(name, suffix, change, id):
    spec = quantization_config.read(PUBLISHED[name].config)
    tensors, _ = PUBLISHED[name].store(torch.randn(40, 96, generator=torch.Generator().manual_seed(0)))
    tensors["bias"] = torch.ones(40)
    mine = compressed_tensors if spec.format == "compressed-tensors" else modelopt
    named = {
        compressed_tensors: {"codes": "weight_packed", "unit": "weight_global_scale", "input": "input_global_scale"},
        modelopt: {"codes": "weight", "unit": "weight_scale_2", "input": "input_scale"},
    }[mine]
    suffix = named.get(suffix, suffix)
    if change == "nan":
        change = poke(0x7F if spec.scale_type == "e4m3" else 0xFF, 5)
    if change == "extreme":
        change = number(1e-38 if mine is compressed_tensors else 3e38)
    if change is None:
        del tensors[suffix]
    else:
        tensors[suffix] = change(tensors[suffix])
    with pytest.raises(AiakqError) as caught:
        mine.read(tensors, spec, "model.layers.3.q_proj")
    assert caught.value.id == id and "model.layers.3.q_proj." in str(caught.value)


def test_scales_of_another_type_than_the_config_says_are_refused():
    tensors = nvfp4(torch.randn(8, 64))[0]
    spec = quantization_config.read(PUBLISHED["mxfp4a16"].config)
    with pytest.raises(AiakqError, match="weight_scale is float8_e4m3fn, not uint8") as caught:
        compressed_tensors.read(tensors, spec)
    assert caught.value.id == "tensor_mismatch"
    integers = quantization_config.read({"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.raises(AiakqError, match="the config says otherwise") as caught:
        compressed_tensors.read(tensors, integers)
    assert caught.value.id == "format_unsupported"


def test_zero_points_and_orders_of_inputs_are_refused():
    spec = quantization_config.read(PUBLISHED["nvfp4a16"].config)
    tensors = nvfp4(torch.randn(8, 64))[0]
    order = torch.arange(64, dtype=torch.int32) // 16
    assert compressed_tensors.read({**tensors, "weight_g_idx": order}, spec).perm is None
    for suffix, value in (("weight_zero_point", torch.ones(8, 4)), ("weight_g_idx", order.flip(0))):
        with pytest.raises(AiakqError) as caught:
            compressed_tensors.read({**tensors, suffix: value}, spec)
        assert caught.value.id == "format_unsupported"


def test_a_group_whose_scale_is_zero_is_zero():
    """Publishers multiply by it; there is no loss, because its codes stand for less than the others can tell."""
    spec = quantization_config.read(PUBLISHED["modelopt-a16"].config)
    tensors = modelopt_nvfp4(torch.randn(8, 64))[0]
    tensors["weight_scale"] = poke(0)(tensors["weight_scale"])
    dense = dequantize(modelopt.read(tensors, spec))
    assert not dense[0, :16].any() and dense[0, 16:].any()


def test_the_smallest_and_the_largest_exponents_are_numbers():
    spec = quantization_config.read(PUBLISHED["mxfp4a16"].config)
    tensors = {"weight_packed": torch.full((1, 32), 0x21, dtype=torch.uint8)}
    tensors["weight_scale"] = torch.tensor([[0, 254]], dtype=torch.uint8)
    weight = compressed_tensors.read(tensors, spec)
    assert weight.scales.tolist() == [[2.0**-127, 2.0**127]]
    assert dequantize(weight)[0, [0, 1, 32, 33]].tolist() == [2.0**-128, 2.0**-127, 2.0**126, 2.0**127]
    tensors["weight_scale"] = tensors["weight_scale"].view(torch.float8_e8m0fnu)
    assert torch.equal(dequantize(compressed_tensors.read(tensors, spec)), dequantize(weight))


# --- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4a8", "modelopt", "mxfp8"])
def test_inspect_describes_the_layers(name, tiny_model, tmp_path):
    publish(tiny_model("LlamaForCausalLM"), tmp_path / "model", PUBLISHED[name])
    report = inspect_checkpoint(str(tmp_path / "model"), device="cpu")
    schemes = {layer.name: layer.scheme for layer in report.layers}
    assert schemes["model.layers.0.mlp.down_proj"] == SCHEMES[name] and schemes["lm_head"] != SCHEMES[name]
    assert not report.differences and len(report.left_out) == len(PUBLISHED[name].extra)


@pytest.mark.parametrize("name", ["nvfp4", "modelopt"])
def test_a_scale_that_is_missing_or_of_another_shape_is_in_the_table_of_differences(name, tiny_model, tmp_path):
    published = PUBLISHED[name]

    def store(weight: Tensor) -> Any:
        tensors, dense = published.store(weight)
        unit = next(suffix for suffix in tensors if suffix in ("weight_global_scale", "weight_scale_2"))
        del tensors[unit]
        return {**tensors, "weight_scale": tensors["weight_scale"][:1]}, dense

    publish(tiny_model("LlamaForCausalLM"), tmp_path / "model", Published(published.config, store))
    with pytest.raises(AiakqError, match=r"weight_(global_scale|scale_2) +- +\[1\]") as caught:
        served_logits(tmp_path / "model")
    assert caught.value.id == "tensor_inventory" and "weight_scale " in str(caught.value)


def test_random_weights_have_the_scheme_of_the_config(tiny_model, tmp_path):
    for name in ("nvfp4", "mxfp4", "modelopt-mxfp4", "mxfp8"):
        publish(tiny_model("LlamaForCausalLM"), tmp_path / name, PUBLISHED[name])
        assert served_logits(tmp_path / name, load_format="dummy").isfinite().all()
