"""The tensors of linears whose weights are 4-bit floats, e2m1, which several formats share: MXFP4 and NVFP4.

For one linear with N outputs, K inputs and groups of G inputs, under the names of compressed-tensors and of ModelOpt:

    weight_packed        weight          [N, K / 2] uint8, two codes per byte, the first in the low bits
    weight_scale         weight_scale    [N, ceil(K / G)]; uint8 or float8_e8m0: 2**(bits - 127) (MXFP4, G = 32), or
                                         float8_e4m3fn (NVFP4, G = 16)
    weight_global_scale  weight_scale_2  [] or [1] float32, NVFP4 only: scales are divided by the one, and multiplied by
                                         the other
    input_global_scale   input_scale     [] or [1] float32, the same for the scales of activations; for MXFP4 with
                                         activations in e4m3 that have one scale, this scale
    bias                 bias            [N] float, optional

A scale of 0 in e4m3 makes its group 0, as it does for the publishers: such a group is below a thousandth of the
smallest step of the largest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.block_scales import as_e4m3, exponents_of
from aiakq.formats.checks import finite, mismatch, need, positive_number, read_bias, shaped
from aiakq.formats.headers import Dimensions, Headers, Shapes, expected_groups, matrix
from aiakq.formats.input_rounding import rounding_of
from aiakq.kernels.ops.block_floats import power_of_two
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

#: Name of the values of codes (aiakq/kernels/tables.py).
TABLE = "e2m1"
_E8M0 = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))


@dataclass(frozen=True)
class Float4Names:
    """Float4Names of the tensors; ``reciprocal``: whether scales are divided by ``unit`` and ``input_unit``."""

    codes: str
    unit: str
    input_unit: str
    reciprocal: bool
    scales: str = "weight_scale"

    @property
    def all(self) -> tuple[str, ...]:
        return self.codes, self.scales, self.unit, self.input_unit, "bias"


COMPRESSED_TENSORS = Float4Names("weight_packed", "weight_global_scale", "input_global_scale", reciprocal=True)
MODELOPT = Float4Names("weight", "weight_scale_2", "input_scale", reciprocal=False)


def holds_codes(headers: Headers, names: Float4Names) -> bool:
    """Whether a module with these tensors is a linear with 4-bit floats, complete or damaged."""
    scaled = names.scales in headers or names.unit in headers
    return matrix(headers, names.codes, "U8") is not None and scaled


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int, names: Float4Names) -> Shapes:
    """Return suffix -> shape of a linear of N x K."""
    shapes: Shapes = {names.codes: (n, -(-k // 2)), names.scales: (n, expected_groups(spec, k))}
    for suffix, is_needed in ((names.unit, spec.scale_type == "e4m3"), (names.input_unit, spec.static_input)):
        if is_needed:
            shape = tuple(headers[suffix].shape) if suffix in headers else (1,)
            shapes[suffix] = shape if shape in ((), (1,), (1, 1)) else (1,)
    return shapes


def dimensions(headers: Headers, spec: QuantSpec, names: Float4Names) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for other headers."""
    n, half = headers[names.codes].shape
    rows, groups = headers[names.scales].shape
    if (rows, groups) != (n, expected_groups(spec, 2 * half)):
        raise ValueError(f"{names.scales} has another shape")
    return Dimensions(n, 2 * half, 4, groups, static_input=spec.static_input and names.input_unit in headers)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str, names: Float4Names) -> QWeight:
    """Read one linear: codes [N, K] uint8 below 16, scales [N, ceil(K / G)] float32, bfloat16 for powers of two.

    Raises ``tensor_mismatch``, ``not_finite``, and ``format_unsupported`` if the config says that codes are not e2m1.
    """
    packed = need(tensors, names.codes, name, 2, torch.uint8)
    if spec.table != TABLE or spec.scale_type is None:
        raise error("format_unsupported", reason=f"{name} has 4-bit floats as weights, and the config says otherwise")
    n, k = packed.shape[0], 2 * packed.shape[1]
    allowed = (torch.float8_e4m3fn,) if spec.scale_type == "e4m3" else _E8M0
    stored = need(tensors, names.scales, name, 2, *allowed)
    shaped(stored, (n, expected_groups(spec, k)), names.scales, name)
    divisor = None
    if spec.scale_type == "e4m3":
        scales, unit = finite(stored.to(torch.float32), names.scales, name), positive_number(tensors, names.unit, name)
        scales = finite(scales / unit if names.reciprocal else scales * unit, names.scales, name)
        divisor = None if unit.is_meta else float(unit) if names.reciprocal else 1 / float(unit)
    else:
        scales = powers(stored, names.scales, name)
    return QWeight(
        scheme=spec.scheme,
        codes=unpack(packed),
        scales=scales,
        bias=read_bias(tensors, n, name),
        group_size=k if spec.group_size == -1 else spec.group_size,
        input_scale=positive_number(tensors, names.input_unit, name) if spec.static_input else None,
        table=values(packed.device),
        rounding=rounding_of(spec, names.reciprocal),
        unit=divisor,
    )


def values(device: torch.device | None = None) -> Tensor:
    """Return the values [16] float32 of the codes."""
    return torch.tensor(TABLES[TABLE], dtype=torch.float32, device=device)


def unpack(packed: Tensor) -> Tensor:
    """Return the codes [N, K] uint8 of [N, K / 2] uint8."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def powers(stored: Tensor, suffix: str, name: str) -> Tensor:
    """Return the scales bfloat16, which holds them exactly, of bits [N, ng] of e8m0. Raises ``not_finite`` for NaN."""
    exponents = stored.contiguous().view(torch.uint8).to(torch.int32)
    if not stored.is_meta:
        finite(torch.where(exponents == 255, torch.nan, 0.0), suffix, name)
    return power_of_two(exponents).to(torch.bfloat16)


# --- writing ----------------------------------------------------------------------------------------------------------


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype, names: Float4Names) -> dict[str, Tensor]:
    """Return the tensors of one linear: the inverse of ``read``. The bias is in ``dtype``.

    Raises ``tensor_mismatch`` for a weight whose codes are not e2m1, or whose scales are not those of ``spec``.
    """
    if weight.table is None or not torch.equal(weight.table.cpu(), values()) or weight.k % 2:
        raise mismatch("linear", f"weight is {weight.scheme}, not an even number of 4-bit floats")
    if weight.perm is not None or weight.offsets is not None or weight.rotated:
        raise mismatch("linear", "weight has an order or a rotation of its inputs, or offsets, which 4-bit floats lack")
    if weight.scales.shape[1] != expected_groups(spec, weight.k):
        raise mismatch("linear", f"weight has groups of {weight.group_size}, not of {spec.group_size}")
    tensors = {names.codes: weight.codes[:, ::2] | (weight.codes[:, 1::2] << 4)}
    if spec.scale_type == "e4m3":
        tensors[names.scales], tensors[names.unit] = as_e4m3(weight.scales, names.reciprocal, weight.unit)
    else:
        tensors[names.scales] = exponents_of(weight.scales)
    if weight.input_scale is not None:
        scale = weight.input_scale.to(torch.float32).reshape(1)
        # Where a scale says all, it is what codes are multiplied by in every file.
        other = spec.scale_type == "e4m3" and weight.rounding.reciprocal != names.reciprocal
        tensors[names.input_unit] = 1 / scale if other else scale
    if weight.bias is not None:
        tensors["bias"] = weight.bias.to(dtype)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}
