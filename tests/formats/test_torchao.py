"""torchao: layouts that no CPU writes, activations, metadata and configs; test_interop.py reads what torchao wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.kernels.types import InputRounding, QWeight

BFLOAT16 = {"_type": "torch.dtype", "_data": "bfloat16"}
FLOAT32 = {"_type": "torch.dtype", "_data": "float32"}
CONFIG = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}


def folder(path: Path, tensors: dict[str, Tensor], kind: str, **values: Any) -> Path:
    """A checkpoint of one linear, ``up``, whose tensors start with ``_weight_``."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    metadata = {"up.weight": json.dumps({"_type": kind, "_data": values}), "tensor_names": '["up.weight"]'}
    stored = {f"up._weight_{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, path / "model.safetensors", metadata=metadata)
    return path


def read(path: Path, tensors: dict[str, Tensor], kind: str, **values: Any) -> QWeight | DecodedWeight:
    checkpoint = Checkpoint.open(folder(path, tensors, kind, **values))
    weight = checkpoint.read_linear("up")
    dimensions, group = checkpoint.dimensions("up")
    assert (dimensions.n, dimensions.k) == (weight.n, weight.k)
    assert isinstance(weight, DecodedWeight) or group == weight.group_size
    return weight


def int8(**changes: Any) -> dict[str, Any]:
    return {"block_size": [1, 8], "dtype": FLOAT32, "act_quant_kwargs": None, "reduce_range": False, **changes}


def inputs(kind: str = "QuantizeTensorToInt8Kwargs", granularity: str = "PerRow", **changes: Any) -> dict[str, Any]:
    detail = {"dim": -1} if granularity == "PerRow" else {}
    return {"_type": kind, "_data": {"granularity": {"_type": granularity, "_data": detail}, **changes}}


def ints() -> dict[str, Tensor]:
    return {"qdata": torch.arange(-16, 16).view(4, 8).to(torch.int8), "scale": torch.arange(1.0, 5)[:, None] / 64}


def test_four_bits_in_rows(tmp_path: Path) -> None:
    """Int4Tensor: two signed codes per byte, scales and zero points [K/G, N]."""
    codes = torch.arange(64).view(4, 16) % 16 - 8
    packed = torch.empty(4, 8, dtype=torch.int8)
    for i in range(4):
        for j in range(8):
            byte = (int(codes[i, 2 * j]) & 15) | (int(codes[i, 2 * j + 1]) & 15) << 4
            packed[i, j] = byte - 256 if byte > 127 else byte
    scale, zero = torch.arange(1.0, 9).view(2, 4).bfloat16() / 32, torch.arange(8.0).view(2, 4).bfloat16()
    weight = read(
        tmp_path,
        {"qdata": packed, "scale": scale, "zero_point": zero},
        "Int4Tensor",
        block_size=[1, 8],
        shape=[4, 16],
        activation_dtype=BFLOAT16,
    )
    expected = torch.empty(4, 16)
    for i in range(4):
        for j in range(16):
            expected[i, j] = codes[i, j] * scale[j // 8, i].float() + zero[j // 8, i].float()
    assert isinstance(weight, QWeight) and weight.rounded is None
    assert torch.equal(as_floats(weight), expected)


def test_four_bits_in_tiles(tmp_path: Path) -> None:
    """Int4TilePackedTo4dTensor: written lane by lane, as CUDA's kernel loads them; N and K are padded."""
    n, k, group = 12, 1056, 32
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (16, 2048), generator=generator)
    words = torch.zeros(2, 16, 32, 4, dtype=torch.int64)
    for tile in range(2):
        for outer in range(16):
            for lane in range(32):
                for inner in range(0, 8, 2):
                    base = (outer * 8 + inner) * 16 + lane % 4 * 2
                    inputs = [base + step for step in (0, 1, 8, 9, 16, 17, 24, 25)]
                    v = [int(codes[tile * 8 + lane // 4, place]) for place in inputs]
                    order = (v[0], v[2], v[4], v[6], v[1], v[3], v[5], v[7])
                    words[tile, outer, lane, inner // 2] = sum(code << 4 * place for place, code in enumerate(order))
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    pairs = torch.randn(2048 // group, 16, 2, generator=generator).bfloat16()
    weight = read(
        tmp_path,
        {"qdata": packed, "scale_and_zero": pairs},
        "Int4TilePackedTo4dTensor",
        block_size=[1, group],
        shape=[n, k],
    )
    assert isinstance(weight, QWeight) and weight.rounded == torch.bfloat16
    spread = pairs.double().repeat_interleave(group, dim=0)[:k, :n]
    expected = (codes[:n, :k] - 8) * spread[..., 0].T + spread[..., 1].T
    assert torch.equal(as_floats(weight, torch.bfloat16), expected.float().bfloat16())


@pytest.mark.parametrize("word", ["SYMMETRIC", "ASYMMETRIC"])
def test_activations_are_rounded_as_torchao_does(tmp_path: Path, word: str) -> None:
    """By 1 / scale, at least float32's epsilon, and before a zero point is added."""
    mapping = {"_type": "MappingType", "_data": word}
    weight = read(tmp_path, ints(), "Int8Tensor", **int8(act_quant_kwargs=inputs(mapping_type=mapping)))
    assert isinstance(weight, QWeight) and weight.scheme == "w8a8"
    x = torch.cat((torch.randn(50, 8), torch.randn(50, 8) * 1e-6, torch.zeros(1, 8), -torch.ones(1, 8)))
    found = round_inputs(x, weight.input_scale, weight.rounding)
    eps = torch.finfo(torch.float32).eps
    for row, values in zip(found, x, strict=True):
        low, high = values.min().clamp(max=0), values.max().clamp(min=0)
        scale = torch.clamp((torch.maximum(-low, high) / 127.5) if word == "SYMMETRIC" else (high - low) / 255, min=eps)
        zero = torch.tensor(0.0) if word == "SYMMETRIC" else torch.clamp(-128 - torch.round(low / scale), -128, 127)
        codes = torch.clamp(torch.round(values * (1 / scale)) + zero, -128, 127)
        assert torch.equal(row, (codes - zero) * scale)


def test_a_stored_scale_of_activations(tmp_path: Path) -> None:
    tensors = ints() | {"act_quant_scale": torch.full((1, 1), 0.25)}
    weight = read(tmp_path, tensors, "Int8Tensor", **int8(act_quant_kwargs=inputs(granularity="PerTensor")))
    assert isinstance(weight, QWeight) and weight.input_scale is not None and float(weight.input_scale) == 0.25
    x = torch.tensor([[0.3, -40.0, 0.125, 0.375, 0, 0, 0, 0]])
    assert torch.equal(
        round_inputs(x, weight.input_scale, weight.rounding), torch.tensor([[0.25, -32, 0, 0.5, 0, 0, 0, 0]])
    )


def test_float8_with_activations_per_token(tmp_path: Path) -> None:
    data = torch.randn(4, 8).to(torch.float8_e4m3fn)
    values = {"block_size": [1, 8], "dtype": BFLOAT16, "mm_config": {"_type": "Float8MMConfig", "_data": {}}}
    kwargs = inputs("QuantizeTensorToFloat8Kwargs", float8_dtype={"_type": "torch.dtype", "_data": "float8_e4m3fn"})
    weight = read(
        tmp_path, {"qdata": data, "scale": ints()["scale"]}, "Float8Tensor", **values, act_quant_kwargs=kwargs
    )
    assert isinstance(weight, QWeight) and (weight.scheme, weight.rounding) == ("fp8a8", InputRounding())
    assert torch.equal(as_floats(weight), data.float() * ints()["scale"])


def test_zero_points_that_are_floats_round_as_torchao_does(tmp_path: Path) -> None:
    tensors = ints() | {"zero_point": torch.full((4, 1), 0.3).bfloat16()}
    tensors["scale"] = tensors["scale"].bfloat16()
    values = {"target_dtype": {"_type": "torch.dtype", "_data": "int8"}, "block_size": [1, 8], "dtype": BFLOAT16}
    weight = read(tmp_path, tensors, "IntxUnpackedToInt8Tensor", **values, activation_quantization=None)
    assert isinstance(weight, DecodedWeight)
    expected = (tensors["qdata"].bfloat16() - tensors["zero_point"]) * tensors["scale"]
    assert torch.equal(weight.values, expected)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("MXTensor", int8()),
        ("Int8Tensor", int8(unknown=1)),
        ("Int8Tensor", int8(block_size=[1, 0])),
        ("Int8Tensor", int8(block_size=[2, 8])),
        ("Int8Tensor", int8(block_size=[1, 3])),
        ("Int8Tensor", int8(block_size=["x", 2**40])),
        ("Int8Tensor", int8(dtype="int4")),
        ("Int8Tensor", int8(act_quant_kwargs=inputs(granularity="PerTensor"))),
        ("Int8Tensor", int8(act_quant_kwargs=inputs(reduce_range=True))),
        ("Int8Tensor", int8(act_quant_kwargs=inputs(unknown=1))),
        ("Int8Tensor", int8(act_quant_kwargs="x")),
        ("Int4Tensor", {"block_size": [1, 8], "shape": [4, 16], "activation_dtype": "float8_e4m3fn"}),
        ("Int4Tensor", {"block_size": [1, 8], "shape": [4, -16]}),
        ("IntxUnpackedToInt8Tensor", {"block_size": [1, 8], "dtype": FLOAT32, "target_dtype": "int9"}),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_else_metadata_says_is_refused(tmp_path: Path, kind: str, values: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        Checkpoint.open(folder(tmp_path, ints(), kind, **values)).read_linear("up")
    assert caught.value.id == "format_unsupported" and "up" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": torch.ones(3, 1)},
        {"scale": torch.full((4, 1), torch.nan)},
        {"scale": torch.zeros(4, 1)},
        {"qdata": torch.zeros(4, 8)},
        {"zero_point": torch.zeros(4, 2, dtype=torch.int8)},
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_tensors_are_refused(tmp_path: Path, changes: dict[str, Tensor]) -> None:
    with pytest.raises(AiakqError) as caught:
        Checkpoint.open(folder(tmp_path, ints() | changes, "Int8Tensor", **int8())).read_linear("up")
    assert caught.value.id in ("tensor_mismatch", "not_finite")


def test_codes_beyond_their_width_are_refused(tmp_path: Path) -> None:
    values = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}, "block_size": [1, 8], "dtype": FLOAT32}
    tensors = ints() | {"zero_point": torch.zeros(4, 1, dtype=torch.int8)}
    with pytest.raises(AiakqError, match="4 bits"):
        read(tmp_path, tensors, "IntxUnpackedToInt8Tensor", **values)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "3"])
def test_metadata_that_is_missing_or_malformed_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    stored = {f"up._weight_{name}": tensor for name, tensor in ints().items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"up.weight": text})
    with pytest.raises(AiakqError, match="metadata about up"):
        Checkpoint.open(tmp_path).read_linear("up")


def test_other_names_of_tensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    for name, said in (("up.weight:qdata", "before version 0.15"), ("experts._gate_up_proj_qdata", "experts")):
        save_file({name: torch.ones(2, 2)}, tmp_path / "model.safetensors")
        with pytest.raises(AiakqError, match=said):
            _ = Checkpoint.open(tmp_path).spec


def test_without_a_config_the_tensors_are_named(tmp_path: Path) -> None:
    folder(tmp_path, ints(), "Int8Tensor", **int8())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AiakqError, match="weights of torchao, without a quantization_config"):
        _ = Checkpoint.open(tmp_path).spec


def entry(kind: str, **values: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": values}


def config(default: object, **others: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": default}, **others}


def test_configs_say_what_most_layers_are() -> None:
    weight_dtype = {"_type": "torch.dtype", "_data": "int3"}
    group = {"_type": "PerGroup", "_data": {"group_size": 32}}
    one = entry("IntxWeightOnlyConfig", weight_dtype=weight_dtype, granularity=group)
    spec = quantization_config.read(config(one, modules_to_not_convert=["lm_head"]))
    assert (spec.scheme, spec.group_size, spec.ignore) == ("w3a16", 32, ("*lm_head*",))
    named = {"_default": None, "re:.*mlp.*": one, "model.embed.weight": entry("Int8WeightOnlyConfig")}
    spec = quantization_config.read(config(entry("FqnToConfig", fqn_to_config=named)))
    found = [spec.for_layer(name) for name in ("a.mlp.up", "model.embed", "a.q")]
    assert [each and each.scheme for each in found] == ["w3a16", "w8a16", None]


INT8 = entry("Int8WeightOnlyConfig")


@pytest.mark.parametrize(
    "changes",
    [
        {"quant_type": "int4_weight_only"},
        {"quant_type": {"default": entry("NVFP4DynamicActivationNVFP4WeightConfig")}},
        {"quant_type": {"default": INT8, "more": 1}},
        {"quant_type": {"default": entry("FqnToConfig", fqn_to_config={"a": None})}},
        {"quant_type": {"default": {**INT8, "unknown": 1}}},
        {"quant_type": {"default": entry("Int8WeightOnlyConfig", unknown=1)}},
        {"quant_type": {"default": entry("Int8DynamicActivationInt8WeightConfig", weight_only_decode=True)}},
        {"quant_type": {"default": entry("AWQConfig", base_config=INT8, unknown=1)}},
        {"quant_type": {"default": entry("SmoothQuantConfig", base_config=entry("Int8WeightOnlyConfig", unknown=1))}},
        {"quant_type": {"default": entry("FqnToConfig", fqn_to_config={"a": INT8}, unknown=1)}},
        {
            "quant_type": {
                "default": entry(
                    "FqnToConfig",
                    fqn_to_config={"a": INT8},
                    module_fqn_to_config={"b": INT8},
                )
            }
        },
        {"unknown": 1},
    ],
    ids=str,
)
def test_other_configs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        quantization_config.read({**config(entry("Int8WeightOnlyConfig")), **changes})
    assert caught.value.id == "format_unsupported" and "torchao" in str(caught.value) or "unknown" in str(caught.value)


def test_fixtures_have_the_schemes_that_their_metadata_says() -> None:
    fixtures = Path(__file__).parent / "fixtures"
    expected = {"ao-int3": "w3a16", "ao-8da4w": "w4a8", "ao-int8-dyn": "w8a8", "ao-f8": "fp8a16"}
    for name, scheme in expected.items():
        checkpoint = Checkpoint.open(fixtures / name)
        assert {checkpoint.linear_spec(linear).scheme for linear in checkpoint.quantized_linears()} == {scheme}


def test_a_linear_in_another_shard_has_its_metadata(tmp_path: Path) -> None:
    """Every shard holds the metadata of all tensors; each tensor is described by that of its own file."""
    one = folder(tmp_path / "one", ints(), "Int8Tensor", **int8())
    shutil.copy(one / "model.safetensors", tmp_path / "model-00001-of-00002.safetensors")
    save_file({"norm.weight": torch.ones(8)}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    assert Checkpoint.open(tmp_path).read_linear("up").n == 4


def test_inputs_are_multiplied_as_torchao_does(tmp_path: Path) -> None:
    """AWQ and SmoothQuant: through torchao's own linear, weight-only and with rounded activations."""
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor, QuantizeTensorToInt8Kwargs

    from aiakq.kernels.ops import Ops

    make = torch.Generator().manual_seed(4)
    factors, x = torch.rand(8, generator=make) + 0.5, torch.randn(3, 8, generator=make)
    tensors = ints() | {"act_pre_scale": factors}
    for kwargs, own in ((None, None), (inputs(), QuantizeTensorToInt8Kwargs(PerRow()))):
        weight = read(tmp_path, tensors, "Int8Tensor", **int8(act_quant_kwargs=kwargs))
        theirs = Int8Tensor(
            tensors["qdata"], tensors["scale"], [1, 8], torch.float32, act_pre_scale=factors, act_quant_kwargs=own
        )
        found = Ops(torch.device("cpu"), torch.float32).linear(weight)(x)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factors", [torch.ones(7), torch.ones(8, dtype=torch.int8), torch.full((8,), torch.nan)])
def test_damaged_factors_are_refused(tmp_path: Path, factors: Tensor) -> None:
    with pytest.raises(AiakqError, match="act_pre_scale") as caught:
        read(tmp_path, ints() | {"act_pre_scale": factors}, "Int8Tensor", **int8())
    assert caught.value.id in ("tensor_mismatch", "not_finite")


def test_zero_points_that_torchao_leaves_out_are_refused(tmp_path: Path) -> None:
    """Its product with whole rows reads none, though dequantizing does."""
    points = torch.tensor([[0], [3], [0], [0]], dtype=torch.int8)
    with pytest.raises(AiakqError, match="zero points of whole rows") as caught:
        read(tmp_path, ints() | {"zero_point": points}, "Int8Tensor", **int8())
    assert caught.value.id == "format_unsupported"
    weight = read(tmp_path, ints() | {"zero_point": torch.zeros_like(points)}, "Int8Tensor", **int8())
    assert isinstance(weight, QWeight) and weight.zeros is None


@pytest.mark.parametrize("kind", ["AWQConfig", "SmoothQuantConfig"])
def test_configs_around_others_are_read(kind: str) -> None:
    inner = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": 64}}
    outer = {"_type": kind, "_version": 1, "_data": {"base_config": inner, "step": "prepare_for_loading"}}
    spec = quantization_config.read({"quant_method": "torchao", "quant_type": {"default": outer}})
    assert (spec.bits, spec.group_size) == (4, 64)
    del outer["_data"]["base_config"]  # type: ignore[attr-defined]
    with pytest.raises(AiakqError, match="torchao with 'None'"):
        quantization_config.read({"quant_method": "torchao", "quant_type": {"default": outer}})
