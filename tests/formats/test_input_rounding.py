"""How the config's words on activations become a rounding, and the scheme of the kernel behind it."""

from __future__ import annotations

import pytest

from aiakq.formats.input_rounding import scheme_of_kernel
from aiakq.spec import Float8, LayerSpec, QuantSpec


@pytest.mark.parametrize(
    ("layer", "scheme"),
    [
        (LayerSpec(8, activation_bits=8), "w8a8"),
        (LayerSpec(8, activation_bits=8, activation_type="int8"), "w8a16"),
        (LayerSpec(7), "w8a16"),
        (LayerSpec(7, activation_bits=8, activation_type="uint8"), "w8a16"),
        (LayerSpec(4, activation_bits=8, activation_type="e4m3"), "w4a16"),
        (LayerSpec(8, activation_bits=8, float8=Float8()), "fp8a8"),
        (LayerSpec(8, 32, activation_bits=8, float8=Float8(1, 32), scale_type="e8m0"), "fp8a16"),
        (LayerSpec(4, 16, activation_bits=4, table="e2m1", scale_type="e4m3"), "lut4a16"),
    ],
    ids=str,
)
def test_the_scheme_of_a_kernel_leaves_out_what_is_rounded_before_it(layer: LayerSpec, scheme: str) -> None:
    assert scheme_of_kernel(QuantSpec("gptq", "gptq", **vars(layer))) == scheme
