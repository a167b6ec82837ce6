"""Every packed weight that a format can hold, through the native kernels of each instruction set, against torch.

The weights are those of the other tools' fixtures, of every format that is written, and of every kind of GGUF blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from aiakq import formats
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.gguf.blocks import LAYOUTS
from aiakq.formats.gguf.decoding import read_weight
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.kernels.cpu import build, library
from aiakq.kernels.cpu import linear as native_linear
from aiakq.kernels.ops import linear_reference
from aiakq.kernels.packing import SUPPORTED_BITS
from aiakq.kernels.types import QWeight
from aiakq.spec import Float8, LayerSpec, QuantSpec
from tests.fp4_files import modelopt_nvfp4, mxfp4
from tests.fp8_files import in_blocks, per_row, per_tensor

HERE = Path(__file__).parent
FIXTURES = sorted(path.parent.name for path in HERE.glob("fixtures/*/config.json"))
SETS = ("portable", "avx2", "avx512", "vnni", "vnni_bf16")
#: Files that do not tell the shapes of their linears: tests/formats/test_interop.py runs them.
_SHAPELESS = ("quanto-int2", "quanto-int4")
CASES = (*(f"file {name}" for name in FIXTURES if name not in _SHAPELESS), *(f"gguf {kind}" for kind in LAYOUTS))
_FORMATS = [name for name in formats.FORMATS if hasattr(formats.load(name), "write")]
#: What formats write: every width of integers, with and without zero points, in groups and not.
_LAYERS = [
    LayerSpec(bits, group, symmetric) for bits in SUPPORTED_BITS for group in (32, -1) for symmetric in (True, False)
] + [LayerSpec(8, activation_bits=8)]


_PLAIN8 = LayerSpec(8, activation_bits=8, float8=Float8())
_MX4 = LayerSpec(4, 32, True, 8, True, table="e2m1", scale_type="e8m0")
_NV4 = LayerSpec(4, 16, True, 4, True, table="e2m1", scale_type="e4m3")
_UNIT = torch.tensor([0.02])
#: Floats, and integers beside rounded activations, in the layouts that no fixture has: format, layer, tensors.
FLOATS: dict[str, tuple[str, LayerSpec, Callable[[Tensor], Any]]] = {
    "fp8 tensor": (
        "fp8",
        replace(_PLAIN8, static_input=True, float8=Float8(-1)),
        lambda w: per_tensor(w, input_scale=0.02),
    ),
    "fp8 computed": ("fp8", replace(_PLAIN8, float8=Float8(-1)), per_tensor),
    "fp8 blocks": (
        "fp8",
        replace(_PLAIN8, group_size=32, float8=Float8(16, 32)),
        lambda w: in_blocks(w, 16, 32, "weight_scale_inv"),
    ),
    "fp8 powers": (
        "fp8",
        replace(_PLAIN8, group_size=32, float8=Float8(16, 32, True)),
        lambda w: in_blocks(w, 16, 32, "weight_scale_inv"),
    ),
    "fbgemm": ("fp8", replace(_PLAIN8, float8=Float8(bound=1200.0)), per_row),
    "fp8 rows": ("compressed-tensors", _PLAIN8, per_row),
    "fp8 groups alone": (
        "compressed-tensors",
        LayerSpec(8, 32, float8=Float8()),
        lambda w: in_blocks(w, 1, 32, "weight_scale"),
    ),
    "modelopt blocks": (
        "modelopt",
        LayerSpec(8, 32, float8=Float8(16)),
        lambda w: in_blocks(w, 16, 32, "weight_scale"),
    ),
    "modelopt NVFP4": ("modelopt", _NV4, lambda w: modelopt_nvfp4(w, 0.02)),
    "modelopt MXFP4": ("modelopt", _MX4, lambda w: mxfp4(w, "weight", input_scale=_UNIT)),
}


@pytest.fixture(params=SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once with every instruction set; skips those that the processor lacks."""
    if reason := library.unavailable():
        try:
            build.find_compiler()
        except build.BuildError:
            pytest.skip(reason)
        pytest.fail(reason)
    native = library.load_library()
    before = native.isa
    try:
        native.use_isa(request.param)
    except OSError as problem:
        pytest.skip(str(problem))
    yield request.param
    native.use_isa(before)


@functools.cache
def weights_of(case: str) -> tuple[QWeight, ...]:
    """One weight of every scheme in a fixture, or of a kind of blocks, without most of its rows."""
    source, _, name = case.partition(" ")
    if source == "gguf":
        blocks = load_file(HERE / "gguf_fixtures" / "blocks.safetensors")[f"{name}.blocks"]
        return (read_weight(blocks, KINDS[NUMBERS[name]], "linear"),)
    checkpoint = Checkpoint.open(HERE / "fixtures" / name)
    found: dict[object, QWeight] = {}
    for prefix in checkpoint.quantized_linears():
        weight = checkpoint.read_linear(prefix)
        if isinstance(weight, QWeight):
            key = (weight.scheme, weight.group_size, weight.k, weight.perm is None, weight.zeros is None)
            found.setdefault(key, weight.with_rows(torch.arange(min(20, weight.n))))
    checkpoint.close()
    return tuple(found.values())


def check(weight: QWeight) -> None:
    """Compare the native kernel's products with those of the reference, in exact and in default arithmetic."""
    # No kernel rounds what bitsandbytes decodes; exact arithmetic decodes such weights at load.
    weight = weight.without_rounding() or weight
    weight = weight if weight.rounded is None else replace(weight, rounded=None)
    x = torch.randn(3, weight.k, generator=torch.Generator().manual_seed(weight.k))
    for exact, largest in ((True, 2e-6), (False, 0.02)):
        problem = weight.problem(torch.float32, "cpu", exact=exact)
        assert native_linear.supports(problem) is None, problem
        wanted = linear_reference.prepare(weight.unpacked, problem)(x)
        found = native_linear.prepare(weight, problem)(x)
        assert float((found - wanted).norm()) <= largest * float(wanted.norm()), (weight.scheme, exact)


@pytest.mark.parametrize("case", CASES)
def test_weights_of_files(case: str, isa: str) -> None:
    for weight in weights_of(case):
        check(weight)


@pytest.mark.parametrize("format", _FORMATS)
def test_weights_of_written_formats(format: str, isa: str) -> None:
    module = formats.load(format)
    make = torch.Generator().manual_seed(3)
    n, k = 32, 64
    for layer in _LAYERS:
        spec = QuantSpec("gptq", format, **vars(layer), ignore=())
        if layer.bits not in getattr(module, "BITS", SUPPORTED_BITS) or formats.supports(spec) is not None:
            continue
        groups = 1 if layer.group_size == -1 else k // layer.group_size
        weight = QWeight(
            scheme=spec.scheme,
            codes=torch.randint(0, 2**layer.bits, (n, k), generator=make).to(torch.uint8),
            scales=(torch.rand(n, groups, generator=make) + 0.1).half(),
            zeros=None
            if layer.symmetric
            else torch.randint(1, 2**layer.bits, (n, groups), generator=make).to(torch.uint8),
            group_size=layer.group_size,
        )
        read = module.read(module.write(weight, spec, torch.float16), spec, "linear")
        assert isinstance(read, QWeight)
        check(read)


@pytest.mark.parametrize("case", FLOATS)
def test_floats_that_no_fixture_has(case: str, isa: str) -> None:
    format, layer, store = FLOATS[case]
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(5)) / 8
    spec = QuantSpec("fp8", format, **vars(layer))
    read = formats.load(format).read(store(w)[0], spec, "linear")
    assert isinstance(read, QWeight) and read.scheme == spec.scheme
    check(read)


@pytest.mark.parametrize("kind", ["int8", "uint8", "e4m3"])
def test_integers_beside_rounded_activations(kind: str, isa: str) -> None:
    codes = torch.randint(0, 16, (32, 64), generator=torch.Generator().manual_seed(5)).to(torch.uint8)
    plain = QWeight("w4a16", codes, (torch.rand(32, 2) + 0.1).half(), group_size=32)
    module, spec = formats.load("compressed-tensors"), QuantSpec("gptq", "compressed-tensors", 4, 32)
    rounded = replace(spec, activation_bits=8, activation_type=kind)
    read = module.read(module.write(plain, spec, torch.float16), rounded, "linear")
    assert isinstance(read, QWeight) and read.scheme == "w4a8"
    check(read)


def test_every_format_is_among_the_cases() -> None:
    """A new format needs a fixture, or to be written."""
    held = {Checkpoint.open(HERE / "fixtures" / name).spec.format for name in FIXTURES} | {"gguf"} | set(_FORMATS)
    emulated = dict.fromkeys(("marlin", "qqq", "bitnet"), "codes of schemes that other cases have")
    emulated |= dict.fromkeys(("aqlm", "squeezellm"), "decoded at load")
    assert set(formats.FORMATS) == held | emulated.keys()
