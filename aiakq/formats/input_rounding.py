"""How the activations of a layer are rounded, as its config says."""

from __future__ import annotations

from aiakq.kernels.types import InputRounding, kernel_scheme
from aiakq.spec import Float8, LayerSpec, QuantSpec

#: The smallest scale that FBGEMM computes.
FBGEMM_MIN_SCALE = 1 / (448 * 512)
#: The smallest scale in e4m3 that ModelOpt computes.
_MODELOPT_MIN_SCALE = 2**-9


def rounding_of(spec: QuantSpec | LayerSpec, reciprocal: bool = False) -> InputRounding:
    """Return how activations are rounded; the default where they are not, or a stored scale says all.

    reciprocal  whether scales in e4m3 are divided by the stored unit, not multiplied; see ``InputRounding``.
    """
    float8 = spec.float8 or Float8()
    if not spec.activation_bits:
        return InputRounding()
    if spec.activation_type is not None:
        return InputRounding(elements=spec.activation_type)
    if spec.scale_type == "e4m3":
        smallest = 0.0 if reciprocal else _MODELOPT_MIN_SCALE
        return InputRounding(spec.group_size, min_scale=smallest, elements="e2m1", scales="e4m3", reciprocal=reciprocal)
    if spec.static_input:
        return InputRounding()
    if spec.scale_type == "e8m0" and not float8.powers_of_two:
        elements = "e2m1" if spec.activation_bits == 4 else "e4m3"
        return InputRounding(spec.group_size, elements=elements, scales="e8m0")
    rounding = InputRounding(max(0, float8.activation_group), float8.powers_of_two)
    if float8.bound is None:
        return rounding
    return InputRounding(rounding.group, rounding.powers_of_two, float8.bound, FBGEMM_MIN_SCALE)


def scheme_of_kernel(spec: QuantSpec, scheme: str | None = None) -> str:
    """Return the scheme of the kernel for the layers of ``spec``; ``scheme``: theirs, where files have other widths."""
    return kernel_scheme(scheme or spec.scheme, rounding_of(spec))
