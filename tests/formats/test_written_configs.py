"""A format says why it does not hold a spec, or its config is read back as the same spec: over a grid, and fixtures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aiakq import formats
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.spec import Float8, LayerSpec, QuantSpec

WRITTEN = [name for name in formats.FORMATS if hasattr(formats.load(name), "to_config")]
FIXTURES = sorted(path.parent for path in (Path(__file__).parent / "fixtures").glob("*/config.json"))
BLOCK, NAMED, UP = "model.layers.0", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"
NAMES = (NAMED, UP, f"{BLOCK}.self_attn.q_proj", "lm_head")
#: Kinds of 8-bit floats: rows, tensors, blocks, blocks of activations, MXFP8, FBGEMM and others.
FLOATS = (
    Float8(),
    Float8(-1),
    Float8(-1, powers_of_two=True),
    Float8(128),
    Float8(128, 128),
    Float8(128, 128, powers_of_two=True),
    Float8(64, 32),
    Float8(1, 32),
    Float8(1, 32, powers_of_two=True),
    Float8(bound=1200.0),
)


def integers() -> Iterator[LayerSpec]:
    kinds = (None, "int8", "uint8", "e4m3")
    for bits, size, symmetric in itertools.product((2, 3, 4, 5, 6, 7, 8), (-1, 32, 100, 128), (True, False)):
        yield LayerSpec(bits, size, symmetric)
        for rounded, static, kind in itertools.product((4, 8), (False, True), kinds):
            yield LayerSpec(bits, size, symmetric, rounded, static, activation_type=kind)


def floats() -> Iterator[LayerSpec]:
    for size, rounded, static in itertools.product((-1, 16, 32, 128), (None, 4, 8), (False, True)):
        if rounded is None and static:
            continue
        for scales in (None, "e8m0", "e4m3"):
            for float8 in FLOATS:
                if rounded is None and float8 != Float8(float8.rows):
                    continue  # it says how activations are rounded, and they are not
                yield LayerSpec(8, size, True, rounded, static, float8, scale_type=scales)
            for bits, table in ((4, "e2m1"), (4, "nf4"), (4, "fp4")):
                yield LayerSpec(bits, size, True, rounded, static, table=table, scale_type=scales)


LAYERS = [*integers(), *floats(), *(LayerSpec(4, 32, blocks=kind) for kind in ("Q4_0", "Q4_K"))]


def check(spec: QuantSpec) -> str | None:
    """Return the reason why a spec is not written; assert that it is what its config says."""
    if (reason := formats.supports(spec)) is not None:
        return reason
    found = quantization_config.read(quantization_config.write(spec))
    assert found.format == spec.format or spec.format == "modelopt" and found.format == "fp8", spec
    for name in NAMES:
        one, other = found.for_layer(name), spec.for_layer(name)
        assert (one and one.layer) == (other and other.layer), f"{name} of {spec}"
        assert found.rotates(name) == spec.rotates(name), spec
    assert found.desc_act == spec.desc_act or spec.desc_act and spec.format not in ("gptq", "gptq_v2"), spec
    return None


@pytest.mark.parametrize("format", WRITTEN)
def test_layers_of_any_kind_are_written_as_they_are_or_refused(format: str) -> None:
    reasons = [check(QuantSpec("gptq", format, **vars(layer))) for layer in LAYERS]
    assert None in reasons and any(reasons), "some are held, and not all"


@pytest.mark.parametrize("format", WRITTEN)
def test_exceptions_for_single_layers_are_written_or_refused(format: str) -> None:
    held = [layer for layer in LAYERS if formats.supports(QuantSpec("gptq", format, **vars(layer))) is None]
    for base, other in itertools.product(held[:: max(1, len(held) // 12)], LAYERS[::7]):
        for layers in (((NAMED, other),), (("*.up_proj", None), (NAMED, other))):
            check(QuantSpec("gptq", format, **vars(base), layers=layers))
    for layers in (((UP, None),), (("*.up_proj", None),), ((r"re:.*\.1\.mlp\.up_proj$", None),)):
        check(QuantSpec("gptq", format, **vars(held[0]), layers=layers))
        check(QuantSpec("gptq", format, **vars(held[0]), ignore=(UP,), layers=layers))
    check(QuantSpec("gptq", format, **vars(held[0]), ignore=()))
    check(QuantSpec("gptq", format, **vars(held[0]), desc_act=True))
    check(QuantSpec("gptq", format, **vars(held[0]), rotated=(r"re:.*mlp\.down_proj$",)))


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_files_of_other_tools_are_written_in_every_format_or_refused(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.spec is not None
    for format in WRITTEN:
        check(replace(checkpoint.spec, format=format))
        for name in checkpoint.quantized_linears()[:2]:
            check(replace(checkpoint.linear_spec(name), format=format))
