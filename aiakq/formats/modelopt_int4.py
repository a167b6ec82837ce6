"""NVIDIA ModelOpt's 4-bit integers: W4A16_AWQ and W4A8_AWQ.

For one linear with N outputs, K inputs and groups of G inputs, symmetric:

    weight            [N / 2, K] uint8: output 2i in the low bits of row i, output 2i + 1 in the high ones, -8 .. 7
    weight_scale      [N, K / G] float: W = code * weight_scale
    weight_scale_2    [] or [1] float, W4A8_AWQ only: W is rounded to e4m3 times this number
    input_scale       [] or [1] float, W4A8_AWQ only: inputs are rounded to e4m3 times this number
    pre_quant_scale   [K] float, optional: inputs are multiplied by it first
    bias              [N] float, optional

This is ``pack_int4_in_uint8`` of modelopt/torch/export/quant_utils.py. Both quantizers of a W4A8_AWQ weight apply when
ModelOpt computes it, so that its codes are read as 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.formats.checks import finite, mismatch, need, positive_number, read_bias, shaped, with_live_scales
from aiakq.formats.headers import Dimensions, Headers, Shapes, matrix
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

#: Name of the factors of inputs.
FACTORS = "pre_quant_scale"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST = 448.0


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    scales = matrix(headers, "weight_scale")
    groups = 1 if scales is None or not scales.shape[1] or k % scales.shape[1] else scales.shape[1]
    shapes: Shapes = {"weight": (n // 2, k), "weight_scale": (n, groups)}
    for suffix in ("weight_scale_2", "input_scale") if spec.activation_bits else ():
        shape = tuple(headers[suffix].shape) if suffix in headers else ()
        shapes[suffix] = shape if shape in ((), (1,)) else ()
    return shapes


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for headers of another layout."""
    rows, k = headers["weight"].shape
    n, groups = headers["weight_scale"].shape
    if n != 2 * rows or not groups or k % groups:
        raise ValueError("weight_scale has another shape")
    return Dimensions(n, k, spec.bits, 1 if spec.float8 else groups, static_input=spec.static_input)


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    """Read one linear: codes [N, K] uint8, scales [N, K / G] float; with W4A8_AWQ, 8-bit floats with one scale.

    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    packed = need(tensors, "weight", name, 2, torch.uint8)
    n, k = 2 * packed.shape[0], packed.shape[1]
    scales = finite(need(tensors, "weight_scale", name, 2, *_FLOATS), "weight_scale", name)
    groups = scales.shape[1]
    if scales.shape[0] != n or k % groups:
        raise mismatch(name, f"weight_scale has shape {list(scales.shape)}, for {n} x {k} weights")
    codes = torch.stack([packed & 15, packed >> 4], dim=1).flatten(0, 1) ^ 8
    bias = read_bias(tensors, n, name)
    weight = QWeight("w4a16", codes, scales.contiguous(), bias=bias, group_size=k // groups)
    with_live_scales(weight, "weight_scale", name)
    if spec.float8 is None:
        return weight
    unit = positive_number(tensors, "weight_scale_2", name)
    values = (codes.to(torch.float32) - 8) * scales.to(torch.float32).repeat_interleave(k // groups, dim=1)
    rounded = (values / unit).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return QWeight(
        scheme="fp8a8",
        codes=rounded.view(torch.uint8),
        scales=unit.expand(n, 1).contiguous(),
        bias=bias,
        input_scale=positive_number(tensors, "input_scale", name),
        code_type=torch.float8_e4m3fn,
    )


def read_factors(tensors: Mapping[str, Tensor], k: int, name: str) -> Tensor | None:
    """Return the factors [K] of the inputs, or None. Raises ``tensor_mismatch`` and ``not_finite``."""
    if FACTORS not in tensors:
        return None
    factors = finite(shaped(need(tensors, FACTORS, name, 1, *_FLOATS), (k,), FACTORS, name), FACTORS, name)
    if bool((factors <= 0).any()):
        raise mismatch(name, f"{FACTORS} has factors that are not positive")
    return factors
