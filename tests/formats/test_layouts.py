"""Each on-disk layout: words written by hand, write -> read identity, files of other tools, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import quantization_config
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

FIXTURES = Path(__file__).parent / "fixtures"


def spec_of(format: str, bits: int, **fields: Any) -> QuantSpec:
    return QuantSpec(method="gptq", format=format, bits=bits, **fields)


def random_weight(scheme: str, group: int = 32, zeros: bool = False, n: int = 64, k: int = 96) -> QWeight:
    bits = int(scheme[1])
    make = torch.Generator().manual_seed(0)
    groups = -(-k // group)
    return QWeight(
        scheme=scheme,
        codes=torch.randint(0, 2**bits, (n, k), generator=make).to(torch.uint8),
        scales=(torch.rand(n, groups, generator=make) - 0.3).half(),
        zeros=torch.randint(1, 2**bits, (n, groups), generator=make).to(torch.uint8) if zeros else None,
        bias=torch.randn(n, generator=make).half(),
        group_size=group,
    )


def same(a: QWeight, b: QWeight) -> None:
    assert (a.scheme, a.group_size) == (b.scheme, b.group_size)
    for field in ("codes", "scales", "zeros", "perm", "bias", "input_scale"):
        left, right = getattr(a, field), getattr(b, field)
        assert (left is None) == (right is None), field
        if left is not None:
            assert torch.equal(left.to(torch.float64), right.to(torch.float64)), field


CASES = [
    *(("gptq", f"w{bits}a16", {}) for bits in (2, 3, 4, 8)),
    ("gptq", "w4a16", {"zeros": True}),
    *(("gptq_v2", f"w{bits}a16", {"zeros": True}) for bits in (2, 3, 4, 8)),
    ("gptq", "w4a16", {"group": 96}),
    ("awq", "w4a16", {"zeros": True}),
    ("awq", "w4a16", {"group": 96}),
    ("awq_gemv", "w4a16", {"zeros": True}),
    ("awq_gemv", "w4a16", {"group": 64, "k": 1024}),
    ("awq_gemv", "w4a16", {"zeros": True, "group": 128, "k": 1280}),
    ("awq_gemv_fast", "w4a16", {"zeros": True, "k": 128}),
    ("awq_gemv_fast", "w4a16", {"zeros": True, "group": 128, "k": 1280}),
    ("awq_gemv_fast", "w4a16", {"group": 64, "k": 192, "n": 20}),
    ("compressed-tensors", "w8a16", {"group": 96}),
    ("compressed-tensors", "w3a16", {"zeros": True}),
    ("compressed-tensors", "w2a16", {}),
    ("compressed-tensors", "w8a16", {}),
    ("compressed-tensors", "w4a16", {"zeros": True}),
    ("compressed-tensors", "w4a16", {"zeros": True, "n": 20, "k": 70, "group": 14}),
    ("compressed-tensors", "w8a8", {"group": 96}),
]


@pytest.mark.parametrize(("format", "scheme", "fields"), CASES)
def test_write_then_read_is_the_same_weight(format: str, scheme: str, fields: dict[str, Any]) -> None:
    weight = random_weight(scheme, **fields)
    groups = weight.scales.shape[1]
    spec = spec_of(
        format,
        weight.bits,
        group_size=weight.group_size if groups > 1 else -1,
        symmetric=weight.zeros is None,
        activation_bits=8 if scheme == "w8a8" else None,
    )
    module = formats.load(format)
    tensors = module.write(weight, spec, torch.float16)
    assert set(tensors) <= set(module.SUFFIXES)
    same(module.read(tensors, spec), weight)
    # The config that goes with it leads to the same reading.
    again = quantization_config.read(json.loads(json.dumps(quantization_config.write(spec))))
    same(module.read(tensors, again), weight)


def test_scrambled_groups_survive() -> None:
    weight = random_weight("w4a16")
    g_idx = (torch.arange(96) // 32)[torch.randperm(96, generator=torch.Generator().manual_seed(3))]
    weight.perm = torch.argsort(g_idx, stable=True)
    spec = spec_of("gptq", 4, group_size=32, desc_act=True)
    module = formats.load("gptq")
    tensors = module.write(weight, spec, torch.float16)
    assert tensors["g_idx"].tolist() == g_idx.tolist()
    same(module.read(tensors, spec), weight)


def as_words(tensor: torch.Tensor) -> list[str]:
    return [f"{value & 0xFFFFFFFF:08x}" for value in tensor.reshape(-1).tolist()]


def test_gptq_words_written_by_hand() -> None:
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[0, :8] = torch.arange(8)
    weight = QWeight("w4a16", codes, torch.ones(32, 1))
    tensors = formats.load("gptq").write(weight, spec_of("gptq", 4), torch.float16)
    assert as_words(tensors["qweight"])[0] == "76543210"  # row 0 of words, output 0
    assert set(as_words(tensors["qzeros"])) == {"77777777"}
    assert tensors["g_idx"].tolist() == [0] * 32
    assert tensors["g_idx"].dtype == torch.int32
    tensors = formats.load("gptq_v2").write(weight, spec_of("gptq_v2", 4), torch.float16)
    assert set(as_words(tensors["qzeros"])) == {"88888888"}
    for bits, expected in ((8, ["7f7f7f7f"]), (3, ["db6db6db", "b6db6db6", "6db6db6d"])):
        weight = QWeight(f"w{bits}a16", codes, torch.ones(32, 1))
        tensors = formats.load("gptq").write(weight, spec_of("gptq", bits), torch.float16)
        assert as_words(tensors["qzeros"])[: len(expected)] == expected


def test_awq_words_written_by_hand() -> None:
    codes = torch.arange(8, dtype=torch.uint8).reshape(8, 1).repeat(1, 32)
    weight = QWeight("w4a16", codes, torch.ones(8, 1), zeros=torch.arange(8, 16, dtype=torch.uint8).reshape(8, 1))
    tensors = formats.load("awq").write(weight, spec_of("awq", 4, symmetric=False), torch.float16)
    assert as_words(tensors["qweight"][0]) == ["75316420"]
    assert as_words(tensors["qzeros"]) == ["fdb9eca8"]


def test_compressed_tensors_words_written_by_hand() -> None:
    codes = torch.tensor([[0, 127, 128, 255]], dtype=torch.uint8)  # -128, -1, 0, 127
    module = formats.load("compressed-tensors")
    tensors = module.write(QWeight("w8a16", codes, torch.ones(1, 1)), spec_of("compressed-tensors", 8), torch.bfloat16)
    assert as_words(tensors["weight_packed"]) == ["ff807f00"]
    assert tensors["weight_shape"].tolist() == [1, 4]
    assert tensors["weight_scale"].dtype == torch.bfloat16
    spec = spec_of("compressed-tensors", 8, activation_bits=8)
    tensors = module.write(QWeight("w8a8", codes, torch.ones(1, 1)), spec, torch.bfloat16)
    assert tensors["weight"].tolist() == [[-128, -1, 0, 127]]
    assert tensors["weight_scale"].dtype == torch.float32


# --- files of other tools, against a decoder that shares nothing with ours -----------------------------------------


def bits_of(words: torch.Tensor, bits: int) -> np.ndarray:
    """int32 [R, W] -> codes [R, W*32/b] through numpy's bit order."""
    stream = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=-1, bitorder="little")
    whole = stream.shape[-1] // bits * bits
    return stream[:, :whole].reshape(len(stream), -1, bits).astype(np.int64) @ (1 << np.arange(bits))


def decode(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> np.ndarray:
    """The float64 weight [N, K], straight from the description of each format."""
    method = config["quant_method"]
    numbers = {name: tensor.to(torch.float64).numpy() for name, tensor in tensors.items()}
    if method in ("gptq", "auto-round"):
        bits = config["bits"]
        q = bits_of(tensors["qweight"].T, bits)
        z = bits_of(tensors["qzeros"], bits).T
        if config.get("checkpoint_format", "gptq") == "gptq":
            words = tensors["qzeros"].numpy().view(np.uint32)
            if "meta" in config and not config["sym"]:
                z = bits_of(torch.from_numpy((words + np.uint32(0x11111111)).view(np.int32)), bits).T
            else:
                z = (z + 1) % 2**bits
        group = tensors["g_idx"].numpy() if "g_idx" in tensors else np.arange(256) // config["group_size"]
        return (q - z[:, group]) * numbers["scales"].T[:, group]
    if method == "awq" and config["version"] == "gemv_fast":
        group = np.arange(256) // config["group_size"]
        scales = numbers["scales"].T[:, group]
        words = tensors["qweight"].numpy().view(np.uint16)
        fields = (words[..., None] >> np.arange(0, 16, 4, dtype=np.uint16)) & 15
        rows = fields.reshape(32, 4, 4, 64).transpose(0, 2, 1, 3).reshape(128, 8, 32).astype(np.int64)
        q = np.zeros_like(rows)
        # Where each of 32 columns goes, as AutoAWQ's packer moves them: in fours of eight, then even before odd.
        for place in range(32):
            inside, step = divmod(place, 8)
            moved = 2 * inside + 8 * (step % 4) + step // 4
            q[:, :, moved] = rows[:, :, place]
        zeros = np.round(-numbers["qzeros"].T[:, group] / scales)
        return (q.reshape(128, 256) - zeros) * scales
    if method == "awq" and config["version"] == "gemv":
        group = np.arange(256) // config["group_size"]
        zeros = bits_of(tensors["qzeros"], 4)
        return (bits_of(tensors["qweight"], 4) - zeros[:, group]) * numbers["scales"][:, group]
    if method == "awq":
        group = np.arange(256) // config["group_size"]

        def natural(words: torch.Tensor) -> np.ndarray:
            fields = bits_of(words, 4).reshape(len(words), -1, 8)
            out = np.zeros_like(fields)
            for field, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                out[:, :, output] = fields[:, :, field]
            return out.reshape(len(words), -1).T

        return (natural(tensors["qweight"]) - natural(tensors["qzeros"])[:, group]) * numbers["scales"].T[:, group]
    scales = numbers["weight_scale"]
    group = np.arange(256) // (256 // scales.shape[1])
    if "weight" in tensors:
        return numbers["weight"] * scales
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    half = 2 ** (bits - 1)
    zero = np.zeros_like(scales)
    if "weight_zero_point" in tensors:
        zero = bits_of(tensors["weight_zero_point"].T, bits).T - half
    return (bits_of(tensors["weight_packed"], bits) - half - zero[:, group]) * scales[:, group]


def weight_of(weight: QWeight) -> np.ndarray:
    group = torch.arange(weight.k) // weight.group_size
    zeros = weight.zeros if weight.zeros is not None else torch.full_like(weight.scales, 2 ** (weight.bits - 1))
    dense = (weight.codes.double() - zeros.double()[:, group]) * weight.scales.double()[:, group]
    if weight.perm is not None:
        unscrambled = torch.empty_like(dense)
        unscrambled[:, weight.perm] = dense
        dense = unscrambled
    return dense.numpy()


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
def test_reads_what_other_tools_wrote(name: str) -> None:
    config = json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]
    prefix = "model.layers.0.self_attn.k_proj."
    with safe_open(FIXTURES / name / "model.safetensors", framework="pt") as file:
        tensors = {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}
    spec = quantization_config.read(config)
    module = formats.load(spec.format)
    weight = module.read(tensors, spec, name)
    assert (weight.n, weight.k) == (128, 256)
    expected = decode(tensors, config)
    np.testing.assert_array_equal(weight_of(weight), expected)
    assert (weight.perm is not None) == (name == "gq-desc")
    if name.startswith("ar-") and "llm" not in name:
        assert bool((weight.scales < 0).any())
    # What we write of it reads back as the same function.
    if name != "gq-asym-v1":  # its zeros of 0 have no agreed spelling in version 1
        again = module.read(module.write(weight, spec, torch.float16), spec, name)
        dense = weight_of(again)
        tolerance = 0 if weight.scales.dtype == torch.float16 or weight.scheme == "w8a8" else 2e-3
        np.testing.assert_allclose(dense, expected, rtol=tolerance)


def test_width_comes_from_the_shapes() -> None:
    """A tool's per-layer override leaves the config's width wrong; the tensors are right."""
    weight = random_weight("w8a16")
    module = formats.load("gptq")
    tensors = module.write(weight, spec_of("gptq", 8, group_size=32), torch.float16)
    same(module.read(tensors, spec_of("gptq", 4, group_size=16)), weight)


# --- refusals --------------------------------------------------------------------------------------------------------


def damaged(tensors: dict[str, torch.Tensor], suffix: str, change: Any) -> dict[str, torch.Tensor]:
    result = dict(tensors)
    result[suffix] = change(result[suffix].clone())
    return result


def poke(value: Any) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("format", "suffix", "change", "id"),
    [
        ("gptq", "g_idx", poke(-1), "tensor_mismatch"),
        ("gptq", "g_idx", poke(3), "tensor_mismatch"),
        ("gptq", "g_idx", poke(1), "tensor_mismatch"),  # a group with 33 channels
        ("gptq", "scales", poke(float("nan")), "not_finite"),
        ("gptq", "scales", lambda t: t[:, :-1], "tensor_mismatch"),
        ("gptq", "qweight", lambda t: t[:-1], "tensor_mismatch"),
        ("gptq", "qweight", lambda t: t.float(), "tensor_mismatch"),
        ("gptq", "qzeros", lambda t: t[:, :-1], "tensor_mismatch"),
        ("gptq", "bias", lambda t: t[:-1], "tensor_mismatch"),
        ("gptq", "bias", poke(float("inf")), "not_finite"),
        ("awq", "scales", poke(float("inf")), "not_finite"),
        ("awq", "qweight", lambda t: t[:, :-1], "tensor_mismatch"),
        ("awq", "qzeros", lambda t: t[:-1], "tensor_mismatch"),
        ("awq", "scales", lambda t: t[:0], "tensor_mismatch"),
        ("compressed-tensors", "weight_shape", poke(63), "tensor_mismatch"),
        ("compressed-tensors", "weight_shape", lambda t: -t, "tensor_mismatch"),
        ("compressed-tensors", "weight_scale", poke(float("nan")), "not_finite"),
        ("compressed-tensors", "weight_packed", lambda t: t[:, :-1], "tensor_mismatch"),
    ],
)
def test_damage_is_refused_by_name(format: str, suffix: str, change: Any, id: str) -> None:
    module = formats.load(format)
    spec = spec_of(format, 4, group_size=32)
    tensors = module.write(random_weight("w4a16"), spec, torch.float16)
    with pytest.raises(AiakqError) as caught:
        module.read(damaged(tensors, suffix, change), spec, "model.layers.3.q_proj")
    assert caught.value.id == id
    assert "model.layers.3.q_proj." in str(caught.value)


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_a_missing_tensor_is_refused(name: str) -> None:
    module = formats.load(name)
    spec = spec_of(name, 4, group_size=32, symmetric=False)
    tensors = module.write(random_weight("w4a16", zeros=True, k=128), spec, torch.float16)
    for suffix in set(tensors) - {"bias", "g_idx"}:
        with pytest.raises(AiakqError, match="missing|needs 3|int8") as caught:
            module.read({key: value for key, value in tensors.items() if key != suffix}, spec, "layer")
        assert caught.value.id == "tensor_mismatch"


def test_scales_that_overflow_are_refused_on_writing() -> None:
    weight = random_weight("w4a16")
    weight.scales = weight.scales.float() * 1e6
    for name in ("gptq", "awq"):
        with pytest.raises(AiakqError) as caught:
            formats.load(name).write(weight, spec_of(name, 4, group_size=32), torch.float16)
        assert caught.value.id == "not_finite"
