"""``quantization_config``: what cannot be read is refused, names are looked up, and tensors overrule it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.spec import LayerSpec, QuantSpec


def group(bits: int) -> dict[str, Any]:
    """A group of compressed-tensors for every linear."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
    return {"targets": ["Linear"], "weights": weights}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq_v2", "bits": 4, "checkpoint_format": "gptq"}, "gptq_v2"),
        ({"quant_method": "gptq_v2", "bits": 4, "checkpoint_format": None, "format": "gptq"}, "gptq_v2"),
        (
            {"quant_method": "awq", "bits": 4, "version": "marlin", "zero_point": True},
            "Marlin with 4 bits, zero points",
        ),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"}, "BitBLAS"),
        ({"quant_method": "bitblas", "bits": 4}, "BitBLAS"),
        ({"quant_method": "exl2", "bits": 4.65}, "ExLlamaV2"),
        ({"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_p"}, "bit planes"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {"bits": 5}}}, "5 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["x"]}, "dynamic"),
        ({"quant_method": "gptq", "bits": [4]}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "32x"}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": True}, "dynamic"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": 3}, "modules_to_not_convert"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}, "W4A16"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "target"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": group(9)},
                "format": "pack-quantized",
            },
            "9 bits",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": group(4)},
                "transform_config": {"config_groups": {"R1": {}}},
            },
            "rotations",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_unsupported_configs_are_refused_in_one_line(config, said):
    with pytest.raises(AiakqError) as caught:
        quantization_config.read(config)
    assert caught.value.id == "format_unsupported" and said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "format"),
    [
        ({"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "awq"),
        ({"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, "gptq"),
    ],
)
def test_configs_of_the_first_tools_name_no_method(config, format):
    spec = quantization_config.read(config)
    assert (spec.format, spec.bits, spec.group_size) == (format, 4, 128)


def test_many_names_are_found_by_lookup():
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(60) for expert in range(250)]
    layers = tuple((name, LayerSpec(8, -1)) for name in names[1::2])
    spec = QuantSpec("gptq", "compressed-tensors", 4, 32, ignore=tuple(names[::2]), layers=layers)
    assert all(spec.for_layer(name) is None for name in names[::2])
    assert all(spec.for_layer(name).bits == 8 for name in names[1::2])


def test_the_layout_comes_from_the_tensors(tmp_path, random_weight):
    """GPTQModel's rounding is GPTQ by name and AWQ by layout; the config may say anything."""
    spec = QuantSpec("awq", "awq", 4, 32, symmetric=False)
    weight = random_weight("w4a16")
    for layout in ("gptq", "awq", "awq_gemv"):
        folder = tmp_path / layout
        folder.mkdir()
        written = formats.load(layout).write(weight, replace(spec, format=layout), torch.float16)
        save_file({f"x.{name}": tensor for name, tensor in written.items()}, folder / "model.safetensors")
        for config in (
            {"quant_method": "gptq", "format": "gemm", "bits": 4, "group_size": 32, "sym": True},
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
            {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32},
            {"quant_method": "awq", "version": "llm-awq", "w_bit": 4, "q_group_size": 32},
        ):
            (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
            read = Checkpoint.open(folder).read_linear("x")
            assert torch.equal(read.codes, weight.codes) and read.zeros is None


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": group(4)}}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**GPTQ, "activation": {"mode": "w4a_nvfp4"}}, "activation"),
        ({**GPTQ, "adapter": {"name": "lora", "path": "eora", "rank": 32}}, "adapter"),
        ({**GPTQ, "act_bits": 8}, "act_bits"),
        ({**GPTQ, "meta": {"rotation": "hadamard"}}, "rotation"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 4, "act_bits": 8}}}, "act_bits"),
        ({**GPTQ, "something_of_next_year": 1}, "something_of_next_year"),
        ({**GPTQ, "checkpoint_format": "gemm", "rotation": "hadamard"}, "rotation"),
        ({"quant_method": "awq", "bits": 4, "pre_scale": True}, "pre_scale"),
        ({"quant_method": "auto-round", "bits": 4, "act_bits": 8, "act_data_type": "int"}, "act_bits"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type"),
        ({"quant_method": "auto-round", "bits": 4, "super_bits": 6}, "super_bits"),
        (
            {"quant_method": "auto-round", "bits": 4, "rotation_config": {"hadamard_type": "hadamard"}},
            "rotation_config",
        ),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"x": {"bits": 8, "act_bits": 8}}}, "act_bits"),
        ({**CT, "transform_config": {"expert_substitution": {"a": 1}}}, "expert_substitution"),
        ({**CT, "moe_sparsity_config": {"method": "prune", "num_experts": [4]}}, "moe_sparsity_config"),
        ({**CT, "config_groups": {"a": {**group(4), "output_activations": {"num_bits": 8}}}}, "output_activations"),
        ({**CT, "config_groups": {"a": {**group(4), "weights": {**group(4)["weights"], "dynamic": True}}}}, "run time"),
        ({**CT, "config_groups": {"a": {**group(4), "weights": {**group(4)["weights"], "codebook": "x"}}}}, "codebook"),
        (
            {**CT, "config_groups": {"a": {**group(8), "input_activations": {"dynamic": True, "strategy": "tensor"}}}},
            "tensor",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_key_that_may_change_the_arithmetic_is_refused_by_name(config, key):
    with pytest.raises(AiakqError) as caught:
        quantization_config.read(config)
    assert caught.value.id == "format_unsupported" and key in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        # AutoGPTQ, optimum, GPTQModel of three years, with the keys that they write.
        {**GPTQ, "damp_percent": 0.01, "desc_act": True, "static_groups": False, "sym": True, "true_sequential": True}
        | {"model_name_or_path": None, "model_file_base_name": "model"},
        {**GPTQ, "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True, "dataset": "c4"}
        | {
            "exllama_config": {"version": 1},
            "use_exllama": True,
            "use_cuda_fp16": False,
            "tokenizer": None,
            "sym": True,
        }
        | {"model_seqlen": 4096, "module_name_preceding_first_block": ["model.embed_tokens"], "max_input_length": 1},
        {**GPTQ, "method": "gptq", "format": "gptq", "pack_dtype": "int32", "lm_head": False, "activation": None}
        | {"meta": {"quantizer": ["gptqmodel:7.6.0"], "mse": 2.0, "vram_strategy": "exclusive"}, "rotation": None},
        {**GPTQ, "dynamic": {"-:.*down.*": {}, "+:.*up.*": {"bits": 8, "mse": 2.4, "desc_act": False}, "x": False}},
        {
            **GPTQ,
            "provider": "auto-round",
            "autoround_version": "0.16.1",
            "amp": False,
            "iters": 20,
            "data_type": "int",
        },
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "do_fuse": False}
        | {"modules_to_not_convert": None, "exllama_config": None, "fuse_max_seq_len": None, "modules_to_fuse": None},
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "act_bits": 16, "act_dynamic": True}
        | {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers", "nsamples": 512}
        | {
            "extra_config": {"lm_head": {"bits": 16, "data_type": "float", "act_bits": 16}},
            "scale_dtype": "torch.float16",
        },
        {
            **CT,
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            "version": "0.19.0",
            "global_compression_ratio": 1.2,
        }
        | {"sparsity_config": {}, "transform_config": {}, "ignore": ["lm_head"], "quantization_status": "compressed"},
    ],
    ids=lambda value: str(value)[:60],
)
def test_keys_that_other_tools_write_are_known(config):
    assert quantization_config.read(config).bits == 4


@pytest.mark.parametrize(
    ("changes", "symmetric"),
    [
        ({"sym": "false"}, False),
        ({"sym": "True"}, True),
        ({"sym": 0}, False),
        ({"bits": "4", "group_size": "32"}, True),
    ],
)
def test_numbers_and_flags_may_be_text(changes, symmetric):
    spec = quantization_config.read({**GPTQ, **changes})
    assert (spec.bits, spec.group_size, spec.symmetric) == (4, 32, symmetric)
    with pytest.raises(AiakqError, match="sym is 'perhaps'"):
        quantization_config.read({**GPTQ, "sym": "perhaps"})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bits": "8"},
        {"num_bits": 8.0, "type": None, "symmetric": None},
        {"type": "INT", "strategy": "TOKEN"},
        {"strategy": "Token", "dynamic": "true"},
        {"dynamic": 1, "group_size": -1, "block_structure": ""},
    ],
    ids=str,
)
def test_spellings_of_activations_of_compressed_tensors(changes):
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, **changes}
    weights = {"num_bits": "8", "type": "Int", "strategy": "CHANNEL", "dynamic": "false", "symmetric": None}
    groups = {"a": {"targets": "Linear", "weights": weights, "input_activations": inputs, "format": "Int-Quantized"}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": "lm_head"}
    spec = quantization_config.read(config)
    assert (spec.bits, spec.symmetric, spec.activation_bits, spec.static_input) == (8, True, 8, False)
    assert spec.for_layer("lm_head") is None and spec.for_layer("model.layers.0.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_bits": "4"}, "4 bits"),
        ({"num_bits": 16}, "16 bits"),
        ({"type": "FLOAT"}, "are floats"),
        ({"type": "float", "symmetric": "false"}, "asymmetric"),
        ({"dynamic": "local"}, "local"),
        ({"dynamic": "false"}, "stored scales and the strategy 'token'"),
        ({"strategy": None, "group_size": 128}, "'group'"),
    ],
    ids=str,
)
def test_activations_that_nothing_computes_are_refused_by_name(changes, said):
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, **changes}
    with pytest.raises(AiakqError, match=said) as caught:
        quantization_config.read({**CT, "config_groups": {"a": {**group(8), "input_activations": inputs}}})
    assert caught.value.id == "format_unsupported"


@pytest.mark.parametrize("value", ["none", "null", "None", "", None, False, [], {}])
def test_no_rotation_and_no_overrides_have_many_spellings(value):
    assert quantization_config.read({**GPTQ, "rotation": value, "dynamic": value if value is False else None}).bits == 4
    assert not quantization_config.read({**GPTQ, "rotation": value}).rotated
    assert quantization_config.read({"quant_method": "awq", "bits": 4, "rotation": value}).format == "awq"
    assert quantization_config.read({**GPTQ, "rotation": "Hadamard"}).rotated


@pytest.mark.parametrize(
    "name",
    [
        "gptq_marlin",
        "auto_gptq",
        "gptqmodel",
        "GPTQ",
        "auto_round",
        "inc",
        "intel/auto-round",
        "awq_marlin",
        "auto_awq",
    ],
)
def test_other_names_of_the_same_files_are_known(name):
    assert quantization_config.read({**GPTQ, "quant_method": name}).bits == 4


@pytest.mark.parametrize(
    "config",
    [
        {"compression_config": CT},
        {"compression_config": {key: value for key, value in CT.items() if key != "quant_method"}},
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "quantization_config": CT,
                "sparsity_config": {},
            }
        },
        {"text_config": {"quantization_config": CT}},
        {"quantization_config": {**CT, "quant_method": "compressed_tensors"}},
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_config_is_found_wherever_programs_write_it(config, tmp_path):
    spec = quantization_config.read_spec(tmp_path, config)
    assert spec is not None and spec.format == "compressed-tensors" and spec.bits == 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization_config": {"quant_method": "deepseek_v4_fp8", "weight_block_size": [128, 128]}}, "FP4"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}}, "ModelOpt"),
        ({"quantization_config": {"quant_method": "quark"}}, "Quark"),
        ({"quantization_config": {"quant_method": "mxfp4"}, "model_type": "llama"}, "GPT-OSS only"),
        ({"quantization_config": {"producer": {"name": "modelopt"}, "quantization": {}}}, "ModelOpt"),
        ({"quantization_config": {"global_quant_config": {"weight": {}}}}, "Quark"),
        ({"quantization_config": {"activation_scheme": "none", "weight_block_size": [128, 128]}}, "FP8"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_formats_that_are_not_read_are_named(config, said, tmp_path):
    with pytest.raises(AiakqError, match=said) as caught:
        quantization_config.read_spec(tmp_path, config)
    assert caught.value.id == "format_unsupported"


@pytest.mark.parametrize(
    ("config", "format", "scheme"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "mlx", "w4a16"),
        ({"quantization_config": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "mlx", "lut4a16"),
        (dict.fromkeys(("quantization", "quantization_config"), {"group_size": 64, "bits": 4}), "mlx", "w4a16"),
        ({"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 6.0}}, "bitsandbytes", "w8a16"),
        ({"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 0.0}}, "bitsandbytes", "w8a8"),
        ({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}, "bitsandbytes", "lut4a16"),
        ({"quantization_config": {"quant_config": {"weight_quant_params": {"nbits": 4}}}}, "hqq", "w4a16"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_configs_without_a_quant_method_are_recognized(config, format, scheme, tmp_path):
    spec = quantization_config.read_spec(tmp_path, config)
    assert spec is not None and (spec.format, spec.scheme) == (format, scheme)


@pytest.mark.parametrize("name", ["gptq_v2", "GPTQ-v2"])
@pytest.mark.parametrize("layout", [{}, {"checkpoint_format": "gptq_v2"}])
def test_the_layout_in_the_name_of_the_method_is_read(name, layout):
    """Zero points of the second version are stored without an offset."""
    config = {"quant_method": name, "bits": 4, "group_size": 128, "sym": False, **layout}
    assert quantization_config.read(config).format == "gptq_v2"


@pytest.mark.parametrize("other", [{"rotation": "hadamard"}, {"checkpoint_format": "gptq_v2"}, {"sym": False}])
def test_a_separate_file_may_not_contradict_the_config(tmp_path, other):
    """GPTQModel reads quantize_config.json first."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "gptq"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    assert quantization_config.read_spec(tmp_path, {"quantization_config": config}).format == "gptq"
    (tmp_path / "quantize_config.json").write_text(json.dumps(config | other))
    with pytest.raises(AiakqError, match=next(iter(other))):
        quantization_config.read_spec(tmp_path, {"quantization_config": config})


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
_LISTED = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "FP8"}},
}


@pytest.mark.parametrize(
    ("file", "config", "same", "other"),
    [
        (
            "hf_quant_config.json",
            {"quant_algo": "NVFP4", "group_size": 16},
            {"group_size": 16},
            {"quant_algo": "W4A16_NVFP4"},
        ),
        ("hf_quant_config.json", {"quant_algo": "FP8"}, {"exclude_modules": ["x"]}, {"quant_algo": "FP8_PB_WO"}),
        ("hf_quant_config.json", _LISTED, {}, {"quantized_layers": {"b": {"quant_algo": "MXFP8"}}}),
        ("quant_config.json", _AWQ, {"version": "GEMM"}, {"version": "gemv"}),
        ("quant_config.json", _AWQ, {"modules_to_not_convert": ["x"]}, {"zero_point": False}),
        ("quantization_config.json", _AUTO_ROUND, {"iters": 7}, {"packing_format": "auto_round:auto_awq"}),
    ],
)
def test_files_beside_the_config_of_other_tools_may_not_contradict_it(tmp_path, file, config, same, other):
    is_modelopt = file == "hf_quant_config.json"
    stored = {"quant_method": "modelopt", **config} if is_modelopt else config
    for changes in (same, other):
        values = {**config, **changes}
        (tmp_path / file).write_text(json.dumps({"quantization": values} if is_modelopt else values))
        if changes is same:
            assert quantization_config.read_spec(tmp_path, {"quantization_config": stored}) is not None
    with pytest.raises(AiakqError, match=f"in {file} that is not that of config.json"):
        quantization_config.read_spec(tmp_path, {"quantization_config": stored})


def test_groups_of_the_config_say_what_mxfp4_in_modelopts_own_file_leaves_open(tmp_path):
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}
    config = {"quant_method": "modelopt", "quant_algo": "MXFP4", "config_groups": groups}
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP4", "group_size": 32}}')
    assert quantization_config.read_spec(tmp_path, {"quantization_config": config}).table == "e2m1"


@pytest.mark.parametrize("other", [{"quant_algo": "NVFP4"}, {"exclude_modules": ["a"]}, {"has_zero_point": True}])
def test_modelopts_config_may_not_contradict_the_one_inside_it(other):
    inner = {"quant_algo": "FP8", "group_size": None, "exclude_modules": ["lm_head"], "has_zero_point": False}
    config = {"quant_method": "modelopt", "quant_algo": "fp8", "quantization": inner}
    assert quantization_config.read(config).float8 is not None
    with pytest.raises(AiakqError, match=next(iter(other))):
        quantization_config.read(config | other)


@pytest.mark.parametrize("inside", [False, True])
def test_a_modelopt_config_of_the_cache_alone_is_refused_as_what_it_is(inside):
    values = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    config = {"quant_method": "modelopt", **({"quantization": values} if inside else values)}
    with pytest.raises(AiakqError, match="weights are not quantized.*--kv-cache-dtype fp8"):
        quantization_config.read(config)


def test_a_config_around_another_may_not_contradict_it(tmp_path):
    inner = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
    config = {"quant_method": "GPTQ", "desc_act": None, "quantization_config": inner}
    assert quantization_config.read_spec(tmp_path, {"quantization_config": config}).symmetric is False
    with pytest.raises(AiakqError, match="sym True, and in the config inside it False"):
        quantization_config.read_spec(tmp_path, {"quantization_config": {**config, "sym": True}})


@pytest.mark.parametrize("place", ["compression_config", "text_config"])
def test_two_configs_in_one_file_may_not_contradict_each_other(tmp_path, place):
    """The first one was read, and the other one left out without a word."""

    def read(other):
        nested = {"quantization_config": other} if place == "text_config" else other
        return quantization_config.read_spec(tmp_path, {"quantization_config": _AWQ, place: nested})

    assert read(_AWQ).format == read({**_AWQ, "modules_to_not_convert": ["visual"]}).format == "awq"
    for changes in ({"version": "gemv"}, {"zero_point": False}, {"group_size": 64}):
        with pytest.raises(AiakqError, match=f"in {place}.* that is not that of other parts of config.json"):
            read({**_AWQ, **changes})
