"""A file format. Codes lie one per byte, so that nothing has to be unpacked to look at them.

For one linear with N outputs, K inputs and ng groups (one for per-channel scales):

    codes   [N, K] uint8
    scales  [N, ng] float
    zeros   [N, ng] uint8, asymmetric only
    bias    [N], optional
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aiakq.formats.checks import derive_group_size, finite, mismatch, need, read_bias, shaped, with_live_scales
from aiakq.formats.headers import Dimensions, Headers, Shapes, expected_groups, matrix, present
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

SUFFIXES = ("codes", "scales", "zeros", "bias")
QUANT_METHODS = ("unpacked",)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_FIELDS = ("method", "bits", "group_size", "symmetric")


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, even if some of its tensors are missing or damaged."""
    return "codes" in headers


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout."""
    return matrix(headers, "codes", "U8") is not None


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """suffix -> shape for a linear of N outputs and K inputs."""
    groups = expected_groups(spec, k)
    shapes: Shapes = {"codes": (n, k), "scales": (n, groups)}
    return shapes | (present(headers, zeros=(n, groups)) if spec.symmetric else {"zeros": (n, groups)})


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """N, K, bits and groups."""
    n, k = headers["codes"].shape
    return Dimensions(n, k, spec.bits, headers["scales"].shape[1])


def supports(spec: QuantSpec) -> str | None:
    """Why these files cannot hold ``spec``; None if they can."""
    if spec.activation_bits:
        return "unpacked files have no quantized activations"
    return "layers of unpacked files are all alike" if spec.mixed else None


def scale_dtype(spec: QuantSpec, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scales are stored."""
    return dtype


def from_config(config: Mapping[str, Any]) -> QuantSpec:
    """The spec of a config."""
    return QuantSpec(format="unpacked", ignore=tuple(config["ignore"]), **{name: config[name] for name in _FIELDS})


def to_config(spec: QuantSpec) -> dict[str, Any]:
    """The ``quantization_config`` of ``spec``."""
    return {"quant_method": "unpacked", "ignore": list(spec.ignore)} | {name: getattr(spec, name) for name in _FIELDS}


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """One linear from its tensors. Raises ``tensor_mismatch`` and ``not_finite``."""
    codes = need(tensors, "codes", name, 2, torch.uint8)
    scales = finite(need(tensors, "scales", name, 2, *_FLOATS), "scales", name)
    (n, k), groups = codes.shape, scales.shape[1]
    group_size = derive_group_size(k, groups, spec.group_size, "scales", name)
    if int(codes.max()) >> spec.bits:
        raise mismatch(name, f"codes hold {int(codes.max())}, which is no code of {spec.bits} bits")
    zeros = None
    if "zeros" in tensors or not spec.symmetric:
        zeros = shaped(need(tensors, "zeros", name, 2, torch.uint8), (n, groups), "zeros", name)
    bias = read_bias(tensors, n, name)
    weight = QWeight(f"w{spec.bits}a16", codes, scales, zeros, bias=bias, group_size=group_size)
    return with_live_scales(weight, "scales", name)


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one linear on the CPU; scales and bias in ``dtype``."""
    if weight.perm is not None:
        raise mismatch("linear", "unpacked files have no order of inputs")
    tensors = {"codes": weight.codes, "scales": finite(weight.scales.to(dtype), "scales", "linear")}
    if weight.zeros is not None:
        tensors["zeros"] = weight.zeros
    if weight.bias is not None:
        tensors["bias"] = weight.bias.to(dtype)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}
