"""Valid but unusual files, and files with wrong metadata, as tools have written them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import compressed_tensors, gptq
from aiakq.formats.safetensors_file import TensorInfo
from aiakq.formats.torchao_metadata import INT4, TorchaoTensor
from aiakq.formats.vptq import VptqLayer
from aiakq.kernels.packing import pack, words_for
from aiakq.kernels.types import QWeight
from aiakq.spec import Float8, QuantSpec
from tests.format_names import INTEGERS


def spec_of(format: str, bits: int = 4, **fields: Any) -> QuantSpec:
    return QuantSpec("gptq", format, bits, 32, **fields)


def weight_of(bits: int = 4, zeros: bool = False, n: int = 64, k: int = 96) -> QWeight:
    """Gaussian weights, rounded to the range of each group, as asymmetric tools do."""
    values = torch.randn(n, k // 32, 32, generator=torch.Generator().manual_seed(1))
    half, top = 2 ** (bits - 1), 2**bits - 1
    if zeros:
        low, high = values.amin(-1), values.amax(-1)
        scales = ((high - low) / top).half().float()
        zero = (-low / scales).round().clamp(1, top)
    else:
        scales = (values.abs().amax(-1) / (half - 1)).half().float()
        zero = torch.full_like(scales, half)
    codes = ((values / scales.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, top)
    return QWeight(
        f"w{bits}a16",
        codes.view(n, k).to(torch.uint8),
        scales,
        zero.to(torch.uint8) if zeros else None,
        group_size=32,
    )


def same(a: QWeight, b: QWeight) -> bool:
    zeros = (a.zeros is None) == (b.zeros is None) and (a.zeros is None or torch.equal(a.zeros, b.zeros))
    return a.scheme == b.scheme and torch.equal(a.codes, b.codes) and torch.equal(a.scales.float(), b.scales) and zeros


# --- GPTQ versions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("written", "label"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_symmetric_files_with_the_wrong_version_are_read_right(bits: int, written: str, label: str) -> None:
    weight = weight_of(bits)
    tensors = gptq.write(weight, spec_of(written, bits), torch.float16)
    assert same(gptq.read(tensors, spec_of(label, bits), "x"), weight)


@pytest.mark.parametrize(("written", "label"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_a_wrong_version_shifts_the_zero_points_of_asymmetric_files_by_one(written: str, label: str) -> None:
    weight = weight_of(zeros=True)
    tensors = gptq.write(weight, spec_of(written, symmetric=False), torch.float16)
    right = gptq.read(tensors, spec_of(written, symmetric=False), "x")
    wrong = gptq.read(tensors, spec_of(label, symmetric=False), "x")
    assert same(right, weight) and abs(gptq.zero_shift(right)) < 0.3
    assert 0.7 < abs(gptq.zero_shift(wrong)) < 1.3


def test_without_g_idx_the_bit_width_comes_from_the_zero_points() -> None:
    weight = weight_of(8)
    tensors = gptq.write(weight, spec_of("gptq", 8), torch.float16)
    del tensors["g_idx"]
    assert same(gptq.read(tensors, spec_of("gptq", 4), "x"), weight)


# --- AWQ ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["awq", "awq_gemv"])
def test_symmetric_awq_needs_no_zero_points(format: str) -> None:
    weight = weight_of()
    module = formats.load(format)
    tensors = module.write(weight, spec_of(format), torch.float16)
    del tensors["qzeros"]
    assert same(module.read(tensors, spec_of(format), "x"), weight)
    with pytest.raises(AiakqError, match="qzeros is missing"):
        module.read(tensors, spec_of(format, symmetric=False), "x")


def test_gemv_fast_under_llm_awqs_name_and_with_its_zeros() -> None:
    weight = weight_of(zeros=True, k=128)
    spec = spec_of("awq_gemv_fast", symmetric=False)
    module = formats.load("awq_gemv_fast")
    tensors = module.write(weight, spec, torch.float16)
    tensors["scaled_zeros"] = tensors.pop("qzeros")
    assert same(module.read(tensors, spec, "x"), weight)
    # A product that no whole zero point explains: then zero points stay what they are.
    tensors["scaled_zeros"] = -(tensors["scales"] * 7.25)
    read = module.read(tensors, spec, "x")
    assert read.zeros is not None and read.zeros.dtype == torch.float32
    assert torch.allclose(read.zeros, torch.full_like(read.zeros, 7.25), atol=0.01)
    tensors["scaled_zeros"] = -(tensors["scales"] * 17)
    with pytest.raises(AiakqError, match="outside 0..15"):
        module.read(tensors, spec, "x")


@pytest.mark.parametrize("implementation", ["linear_reference", "dequantized"])
def test_float_zero_points_are_computed_with(implementation: str) -> None:
    import importlib

    weight = weight_of(zeros=True)
    assert weight.zeros is not None
    weight.zeros = weight.zeros.float() + 0.25
    module = importlib.import_module(f"aiakq.kernels.ops.{implementation}")
    problem = weight.problem(torch.float32, "cpu")
    x = torch.randn(3, 96)
    group = torch.arange(96) // 32
    dense = (weight.codes - weight.zeros[:, group]) * weight.scales[:, group]
    torch.testing.assert_close(module.prepare(weight, problem)(x), x @ dense.T)


# --- compressed-tensors ---------------------------------------------------------------------------------------------


def padded(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Ten 3-bit codes a word, two bits of it unused."""
    rows = codes.to(torch.int64).movedim(dim, -1)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 10)).unflatten(-1, (-1, 10))
    return (rows << torch.arange(0, 30, 3)).sum(-1).to(torch.int32).movedim(-1, dim).contiguous()


@pytest.mark.parametrize("zeros", [False, True])
def test_three_bit_codes_padded_to_words(zeros: bool) -> None:
    weight = weight_of(3, zeros)
    spec = spec_of("compressed-tensors", 3, symmetric=not zeros)
    tensors = compressed_tensors.write(weight, spec, torch.float32)
    assert tensors["weight_packed"].shape[1] == words_for(96, 3) == 9
    assert same(compressed_tensors.read(tensors, spec, "x"), weight)
    tensors["weight_packed"] = padded(weight.codes, -1)
    if weight.zeros is not None:
        tensors["weight_zero_point"] = padded(weight.zeros, 0)
    assert tensors["weight_packed"].shape[1] == 10
    assert same(compressed_tensors.read(tensors, spec, "x"), weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_bit_width_comes_from_the_packed_tensors(bits: int) -> None:
    weight = weight_of(bits)
    tensors = compressed_tensors.write(weight, spec_of("compressed-tensors", bits), torch.float32)
    for said in (2, 3, 4, 8):
        assert same(compressed_tensors.read(tensors, spec_of("compressed-tensors", said), "x"), weight)


def test_unpacked_zero_points_are_read() -> None:
    weight = weight_of(zeros=True)
    spec = spec_of("compressed-tensors", symmetric=False)
    tensors = compressed_tensors.write(weight, spec, torch.float32)
    assert weight.zeros is not None
    tensors["weight_zero_point"] = (weight.zeros.to(torch.int16) - 8).to(torch.int8)
    assert same(compressed_tensors.read(tensors, spec, "x"), weight)
    tensors["weight_zero_point"][3, 1] = 8
    with pytest.raises(AiakqError, match="weight_zero_point is 8, outside -8..7"):
        compressed_tensors.read(tensors, spec, "x")


def test_naive_quantized_four_bit_codes_are_stored_in_eight_bits() -> None:
    values = torch.randint(-8, 8, (64, 96), dtype=torch.int8)
    tensors = {"weight": values, "weight_scale": torch.ones(64, 3)}
    read = compressed_tensors.read(tensors, spec_of("compressed-tensors"), "x")
    assert read.scheme == "w8a16" and torch.equal(read.codes.to(torch.int16) - 128, values.to(torch.int16))


def test_a_single_scale_is_expanded_to_rows() -> None:
    weight = weight_of()
    tensors = compressed_tensors.write(weight, spec_of("compressed-tensors"), torch.float32)
    tensors["weight_scale"] = torch.tensor([0.5])
    read = compressed_tensors.read(tensors, spec_of("compressed-tensors"), "x")
    assert read.group_size == 96 and bool((read.scales == 0.5).all())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_an_input_order_of_weights_that_are_not_packed_is_refused(dtype: torch.dtype) -> None:
    spec = spec_of("compressed-tensors", 8, float8=Float8() if dtype.is_floating_point else None)
    tensors = {"weight": torch.ones(64, 96).to(dtype), "weight_scale": torch.ones(64, 3)}
    natural = torch.arange(96, dtype=torch.int32) // 32
    assert compressed_tensors.read(tensors | {"weight_g_idx": natural}, spec, "x").perm is None
    with pytest.raises(AiakqError, match="x has an input order of its own .weight_g_idx.") as caught:
        compressed_tensors.read(tensors | {"weight_g_idx": natural.flip(0)}, spec, "x")
    assert caught.value.id == "format_unsupported"


@pytest.mark.parametrize("changes", [{"weight_scale": torch.ones(64, 3)}, {"weight_zero_point": torch.ones(64, 1)}])
def test_w8a8_that_no_kernel_has_is_rounded_before_one(changes: dict[str, torch.Tensor]) -> None:
    tensors = {"weight": torch.ones(64, 96, dtype=torch.int8), "weight_scale": torch.ones(64, 1)}
    tensors |= {name: tensor.to(torch.int8) if "zero" in name else tensor for name, tensor in changes.items()}
    read = compressed_tensors.read(tensors, spec_of("compressed-tensors", 8, activation_bits=8), "x")
    inner = read.without_rounding()
    assert (read.scheme, read.rounding.elements) == ("w8a8", "int8") and inner is not None and inner.scheme == "w8a16"


# --- scales of zero ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("zeros", [False, True])
def test_a_scale_of_zero_is_only_for_dead_groups(format: str, zeros: bool) -> None:
    weight = weight_of(zeros=zeros, k=128)
    spec = spec_of(format, symmetric=not zeros)
    module = formats.load(format)
    zero = 8 if weight.zeros is None else int(weight.zeros[5, 2])
    weight.scales[5, 2] = 0
    weight.codes[5, 64:96] = zero
    read = module.read(module.write(weight, spec, torch.float16), spec, "x")
    assert float(read.scales[5, 2]) == 0
    weight.codes[5, 70] = zero ^ 1
    suffix = "weight_scale" if format == "compressed-tensors" else "scales"
    with pytest.raises(AiakqError, match=f"x.{suffix} is 0 for output 5, group 2") as caught:
        module.read(module.write(weight, spec, torch.float16), spec, "x")
    assert caught.value.id == "tensor_mismatch"


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("format", formats.FORMATS)
def test_the_shapes_that_are_expected_are_found_whatever_a_header_says(format: str, shape: tuple[int, ...]) -> None:
    described: dict[str, dict[str, Any]] = {
        "gguf": {"blocks": "Q4_0"},
        "aqlm": {"notes": {"sizes": (1, 256, 1, 8)}},
        "vptq": {"notes": {"stored": VptqLayer(64, 96, 1, 96, 8, 8, 4, permuted=False)}},
        "torchao": {"notes": {"stored": TorchaoTensor(INT4, (64, 96), (1, 32), torch.bfloat16, False)}},
    }
    module, spec = formats.FORMATS.load(format), spec_of(format, **described.get(format, {}))
    for suffix in module.SUFFIXES:
        headers = {one: TensorInfo("I32", shape if one == suffix else (64, 12), "f") for one in module.SUFFIXES}
        expected = module.packed_shapes(headers, spec, 64, 96)
        assert all(isinstance(size, int) for one in expected.values() for size in one)


def test_packing_helpers_agree() -> None:
    codes = torch.arange(8, dtype=torch.uint8).repeat(4).view(1, 32)
    assert not torch.equal(padded(codes, -1)[:, :3], pack(codes, 3))
