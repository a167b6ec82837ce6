"""The registry of formats: the interface of every module, how layouts are distinguished, and a plugin's format."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiakq import formats
from aiakq.errors import REGISTRY, AiakqError
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.compatibility import Readers
from aiakq.formats.inventory import RequiredTensors, compare
from aiakq.formats.safetensors_file import TensorInfo
from aiakq.registry import Registry
from aiakq.spec import Float8, LayerSpec, QuantSpec
from tests.format_names import READ_ONLY

CALLABLE = "holds_codes matches packed_shapes dimensions from_config read".split()
WRITING = "supports scale_dtype to_config write".split()


def headers(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {suffix: TensorInfo(dtype, shape, "x") for suffix, (dtype, shape) in tensors.items()}


@pytest.mark.parametrize("name", formats.FORMATS)
def test_every_format_offers_the_whole_interface(name: str) -> None:
    module = formats.load(name)
    assert all(callable(getattr(module, function)) for function in CALLABLE)
    assert module.SUFFIXES and module.QUANT_METHODS
    if name in READ_ONLY:
        assert not all(hasattr(module, function) for function in WRITING)
        assert formats.supports(QuantSpec("gptq", name, 4, 128)) is not None
        return
    assert all(callable(getattr(module, function)) for function in WRITING)
    spec = QuantSpec("gptq", name, 4, 128)
    if name == "fp8":
        assert module.supports(spec) == "such files hold 8-bit floats"
        spec = QuantSpec("fp8", name, 8, activation_bits=8, float8=Float8(rows=-1))
    if name == "modelopt":
        assert "W4A16_NVFP4" in module.supports(spec)
        spec = QuantSpec("nvfp4", name, 4, 16, table="e2m1", scale_type="e4m3")
    assert module.supports(spec) is None
    assert quantization_config.read(module.to_config(spec)).format == name


def test_the_error_for_an_unknown_format_names_the_built_in_ones() -> None:
    remedy = REGISTRY["format_unsupported"].remedy.lower()
    for name in formats.FORMATS:
        if formats.FORMATS.package(name) is None:
            assert name.removesuffix("_v2").removeprefix("awq_") in remedy


@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "awq", "awq_gemv", "awq_gemv_fast"])
def test_files_of_integers_hold_no_floats_of_4_bits(name: str) -> None:
    spec = QuantSpec("nvfp4", name, 4, 16, table="e2m1", scale_type="e4m3")
    assert formats.load(name).supports(spec) == "such files hold no 4-bit floats"


def test_a_format_with_zero_points_replaces_only_one_that_has_none() -> None:
    for name, other in formats.WITH_ZERO_POINTS.items():
        specs = [QuantSpec("gptq", format, 4, 128, symmetric=False) for format in (name, other)]
        assert [formats.load(spec.format).supports(spec) is None for spec in specs] == [False, True]


#: Headers of one linear of 64 outputs and 96 inputs in groups of 32 -> the layouts whose shapes they have.
LINEARS = {
    "gptq": headers(qweight=("I32", (12, 64)), scales=("F16", (3, 64)), qzeros=("I32", (3, 8))),
    "awq": headers(qweight=("I32", (96, 8)), scales=("F16", (3, 64)), qzeros=("I32", (3, 8))),
    "awq_gemv": headers(qweight=("I32", (64, 12)), scales=("F16", (64, 32)), qzeros=("I32", (64, 4))),
    "awq_gemv_fast": headers(qweight=("I16", (16, 96)), scales=("F16", (32, 64)), qzeros=("F16", (32, 64))),
    "compressed-tensors": headers(weight_packed=("I32", (64, 12)), weight_scale=("F16", (64, 3))),
}


@pytest.mark.parametrize("label", formats.FORMATS)
@pytest.mark.parametrize("layout", LINEARS)
def test_tensor_shapes_override_the_configured_format(layout: str, label: str) -> None:
    found = formats.layout_of(LINEARS[layout], label)
    assert found == (label if {layout, label} == {"gptq", "gptq_v2"} else layout)


@pytest.mark.parametrize("label", ["gptq", "awq_gemv"])
def test_the_configured_format_decides_where_shapes_are_ambiguous(label: str) -> None:
    """A symmetric linear with as many words as groups fits two layouts; broken shapes fit none."""
    both = headers(qweight=("I32", (64, 64)), scales=("F16", (64, 64)))
    assert formats.layout_of(both, label) == label
    none = headers(qweight=("I32", (7, 64)), scales=("F16", (3, 5)))
    assert formats.layout_of(none, label) == label
    assert formats.layout_of(both, "compressed-tensors") == "compressed-tensors"


def test_a_linear_without_its_scales_still_counts_as_packed() -> None:
    for linear in LINEARS.values():
        rest = {suffix: info for suffix, info in linear.items() if not suffix.endswith(("scale", "scales"))}
        assert formats.holds_codes(rest)
    assert not formats.holds_codes(headers(weight=("F16", (4, 4)), bias=("F16", (4,))))
    assert not formats.holds_codes(headers(weight=("I8", (4, 4))))
    assert formats.holds_codes(headers(weight=("I8", (4, 4)), weight_scale=("F32", (4, 1))))


@pytest.mark.parametrize(
    "spec, experts, expected",
    [
        (QuantSpec("gptq", "gptq", 4, 128), False, "gptq"),
        (QuantSpec("gptq", "gptq", 4, 128), True, "compressed-tensors"),
        (QuantSpec("gptq", "gptq_v2", 4, 128, symmetric=False), True, "gptq_v2"),
        (QuantSpec("gptq", "gptq", 4, 128, symmetric=False), False, "compressed-tensors"),
        (QuantSpec("gptq", "gptq", 4, 128, layers=(("a", None),)), False, "compressed-tensors"),
        (QuantSpec("awq", "awq", 4, 128, layers=(("a", None),)), True, "awq"),
        (QuantSpec("awq", "awq", 4, 128, layers=(("a", LayerSpec(4, 64)),)), False, "compressed-tensors"),
        (QuantSpec("awq", "awq", 8, 128), False, "compressed-tensors"),
    ],
)
def test_the_format_that_is_chosen_holds_the_spec(spec: QuantSpec, experts: bool, expected: str) -> None:
    assert formats.choose(spec, experts) == expected


# --- a format from outside --------------------------------------------------------------------------------------------

BYTES = '''
"""One unsigned byte per code: codes [K, N] uint8 (transposed), steps [N, 1] float32."""

import torch

from aiakq.formats.checks import need, shaped
from aiakq.formats.headers import Dimensions
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

SUFFIXES = ("codes", "steps")
QUANT_METHODS = ("bytes",)

def holds_codes(headers):
    return "codes" in headers

def matches(headers):
    return holds_codes(headers) and "steps" in headers

def packed_shapes(headers, spec, n, k):
    return {"codes": (k, n), "steps": (n, 1)}

def dimensions(headers, spec):
    k, n = headers["codes"].shape
    return Dimensions(n, k, 8, headers["steps"].shape[1])

def supports(spec):
    return None if (spec.bits, spec.group_size, spec.symmetric) == (8, -1, True) else "one byte, one scale"

def scale_dtype(spec, dtype):
    return torch.float32

def from_config(config):
    return QuantSpec("weight_only_int8", "bytes", 8)

def to_config(spec):
    return {"quant_method": "bytes"}

def read(tensors, spec, name="linear"):
    codes = need(tensors, "codes", name, 2, torch.uint8).T.contiguous()
    return QWeight("w8a16", codes, shaped(tensors["steps"], (codes.shape[0], 1), "steps", name))

def write(weight, spec, dtype):
    return {"codes": weight.codes.T.contiguous(), "steps": weight.scales.float()}
'''


@pytest.fixture
def bytes_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The registry with one more module, which lies outside the tree."""
    (tmp_path / "format_of_bytes.py").write_text(textwrap.dedent(BYTES))
    monkeypatch.syspath_prepend(str(tmp_path))
    more = Registry("aiakq.formats", {**formats.FORMATS, "bytes": "format_of_bytes"})
    monkeypatch.setattr(formats, "FORMATS", more)
    formats.modules.cache_clear()
    formats.all_suffixes.cache_clear()
    yield
    formats.modules.cache_clear()
    formats.all_suffixes.cache_clear()
    sys.modules.pop("format_of_bytes", None)


@pytest.mark.usefixtures("bytes_format")
def test_a_format_from_outside_is_found_checked_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors: dict[str, Any] = {"codes": torch.arange(12, dtype=torch.uint8).view(4, 3), "steps": torch.ones(3, 1)}
    save_file({f"x.{suffix}": tensor for suffix, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bytes"}}))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.quantized_linears() == ["x"] and checkpoint.layout("x") == "bytes"
    dimensions, group_size = checkpoint.dimensions("x")
    assert (dimensions.n, dimensions.k, dimensions.bits, group_size) == (3, 4, 8, 4)
    assert compare(checkpoint, RequiredTensors(linears={"x": (3, 4, False)})) == []
    (found,) = compare(checkpoint, RequiredTensors(linears={"x": (3, 5, False)}))
    assert (found.name, found.expected) == ("x.codes", "[5, 3]")
    weight = checkpoint.read_linear("x")
    assert torch.equal(weight.codes, tensors["codes"].T)
    spec = checkpoint.spec
    assert spec is not None and quantization_config.read(quantization_config.write(spec)) == spec
    # What a module leaves out has a default.
    assert formats.unportable(spec, True) is None and formats.shape_problem(spec, 3, 4) is None
    assert formats.config_files(spec) == {} and formats.word_shape(spec) == (1, 1)
    assert formats.remark("bytes", weight, "x") is None and formats.reader_notes(spec, True) == []
    assert formats.readers("bytes", {"w8a16"}, False) == Readers() and formats.records_method("bytes")


def test_without_it_the_same_config_is_refused() -> None:
    with pytest.raises(AiakqError, match="quant_method is 'bytes'"):
        quantization_config.read({"quant_method": "bytes"})
