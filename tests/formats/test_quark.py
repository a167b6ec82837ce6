"""AMD Quark's config of 8-bit floats. Quark is not installed: the configs follow those that its export writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import quantization_config
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.spec import Float8, LayerSpec

TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "ch_axis": None, "scale_type": "float"}
CHANNEL = {**TENSOR, "qscheme": "per_channel", "ch_axis": 0}
TOKEN = {**TENSOR, "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}


def config_of(weight: Any = TENSOR, inputs: Any = TENSOR, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "algo_config": None,
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        **changes,
    }


def test_kinds_of_scales() -> None:
    static = LayerSpec(8, activation_bits=8, static_input=True, float8=Float8(-1))
    assert quantization_config.read(config_of()).layer == static
    assert quantization_config.read(config_of(CHANNEL, TOKEN)).layer == LayerSpec(
        8, activation_bits=8, float8=Float8(1)
    )
    assert quantization_config.read(config_of(CHANNEL, None)).layer == LayerSpec(8, float8=Float8(1))
    assert quantization_config.read(config_of()).for_layer("lm_head") is None


def test_scales_of_a_kv_cache_are_left_out() -> None:
    entry = {"weight": CHANNEL, "input_tensors": TENSOR, "output_tensors": TENSOR, "bias": None}
    spec = quantization_config.read(config_of(layer_quant_config={"*k_proj": entry}))
    assert spec.for_layer("model.layers.0.self_attn.k_proj").float8 == Float8(1)
    assert spec.for_layer("model.layers.0.self_attn.o_proj").float8 == Float8(-1)


@pytest.mark.parametrize("static", [True, False])
def test_products_are_those_of_rounded_inputs(static: bool) -> None:
    make = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 64, generator=make).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.01) if static else torch.rand(24, generator=make) + 0.1
    tensors = {"weight": weight, "weight_scale": scale}
    x = torch.randn(5, 64, generator=make)
    if static:
        tensors["input_scale"] = torch.tensor(0.02)
    spec = quantization_config.read(config_of() if static else config_of(CHANNEL, TOKEN))
    read = formats.load(spec.format).read(tensors, spec, "linear")
    wanted = round_inputs(x, tensors.get("input_scale"), read.rounding) @ (weight.float() * scale.reshape(-1, 1)).T
    found = Ops(torch.device("cpu"), torch.float32).linear(read)(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (config_of({**TENSOR, "dtype": "fp4", "qscheme": "per_group", "group_size": 32}), "'fp4'; fp8_e4m3 is read"),
        (config_of({**TENSOR, "dtype": "int8"}), "'int8'"),
        (config_of({**CHANNEL, "ch_axis": 1}), "per_channel along 1"),
        (config_of(inputs={**TENSOR, "is_dynamic": True}), "computed scales per_tensor"),
        (config_of(TENSOR | {"surprise": 3}), "surprise"),
        (config_of(TENSOR | {"group_size": 128}), "group_size 128"),
        (config_of(inputs={**TENSOR, "symmetric": "asym"}), "symmetric 'asym'"),
        (config_of(TENSOR | {"scale_format": "e8m0"}), "scale_format 'e8m0'"),
        (config_of(TENSOR | {"mx_element_dtype": "fp4"}), "mx_element_dtype"),
        (config_of(TENSOR | {"is_scale_quant": True}), "is_scale_quant"),
        (config_of(algo_config=[{"name": "rotation"}]), "algorithm 'rotation'"),
        (config_of(algo_config={"name": "quarot"}), "algorithm 'quarot'"),
        (config_of(export={"weight_format": "fake_quantized"}), "fake_quantized"),
        (config_of(layer_quant_config={"*o_proj": {"weight": TENSOR, "output_tensors": TENSOR}}), "biases or outputs"),
        (config_of(layer_type_quant_config={"Linear": {}}), "types of layers"),
        (config_of(softmax_quant_spec={"dtype": "fp8_e4m3"}), "softmax"),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(AiakqError, match=said) as caught:
        quantization_config.read(config)
    assert caught.value.id == "format_unsupported" and "\n" not in str(caught.value)
