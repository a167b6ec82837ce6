"""Every packed weight that a format can hold, through the native kernels of each instruction set, against torch.

The weights are those of the other tools' fixtures, of every format that is written, and of every kind of GGUF blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
from aiakq.spec import LayerSpec, QuantSpec

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
    weight = replace(weight.without_rounding() or weight, rounded=None)
    x = torch.randn(3, weight.k, generator=torch.Generator().manual_seed(weight.k))
    for exact, largest in ((True, 2e-6), (False, 0.02)):
        problem = weight.problem(torch.float32, "cpu", exact=exact)
        assert native_linear.supports(problem) is None, problem
        wanted = linear_reference.prepare(weight, problem)(x)
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


def test_every_format_is_among_the_cases() -> None:
    """A new format needs a fixture, or to be written."""
    held = {Checkpoint.open(HERE / "fixtures" / name).spec.format for name in FIXTURES} | {"gguf"} | set(_FORMATS)
    emulated = dict.fromkeys(("marlin", "qqq"), "codes of schemes that other cases have")
    emulated |= dict.fromkeys(("aqlm", "squeezellm"), "decoded at load")
    assert set(formats.FORMATS) == held | emulated.keys()
