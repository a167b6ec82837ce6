"""Checks of weights that multiply inputs rotated by a Hadamard matrix (GPTQModel)."""

from __future__ import annotations

from collections.abc import Mapping

from aiakq import formats
from aiakq.formats.config_values import unsupported
from aiakq.formats.headers import Headers
from aiakq.kernels import hadamard
from aiakq.spec import QuantSpec


def check_rotated(spec: QuantSpec, linears: Mapping[str, Headers]) -> None:
    """Raise ``format_unsupported`` if the inputs of some linear cannot be rotated; ``linears`` are those that are."""
    for name, headers in sorted(linears.items()):
        if "qweight" not in headers or not formats.layout_of(headers, spec.format).startswith("gptq"):
            raise unsupported(f"rotation, and {name:.200} is not quantized as GPTQ")
        k = formats.load(spec.format).dimensions(headers, spec.for_layer(name) or spec).k
        if hadamard.factors(k) is None:
            raise unsupported(f"rotation of {k} inputs ({name:.200}), for which it defines no Hadamard matrix")
    if not linears:
        raise unsupported("rotation, and no linear layer is called mlp.down_proj")
