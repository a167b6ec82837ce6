"""NVIDIA ModelOpt: NVFP4, MXFP4 and MXFP8, AWQ of 4-bit integers and of NVFP4, and models of these and FP8.

The tensors of a linear are described in float4.py, float8.py and modelopt_int4.py, the config in modelopt_config.py.
Inputs of linears with a ``pre_quant_scale`` are multiplied by it before they are rounded. Models of nothing
but FP8 have the format ``fp8``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from aiakq.formats import float4, float8, modelopt_config, modelopt_int4
from aiakq.formats.compatibility import Readers
from aiakq.formats.headers import Dimensions, Headers, Shapes, present
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

_FP4 = float4.MODELOPT
SUFFIXES = tuple(sorted({*float8.SUFFIXES, *_FP4.all, modelopt_int4.FACTORS}))
QUANT_METHODS = modelopt_config.METHODS
RECORDS_METHOD = False
WIDTH_MULTIPLE = 128
#: Tables whose indices such files hold.
TABLES = ("e2m1",)
from_config = modelopt_config.from_config
to_config = modelopt_config.to_config
writer = modelopt_config.writer


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a linear with small floats, even if some tensors are missing."""
    return float4.holds_codes(headers, _FP4) or float8.holds_codes(headers)


def matches(headers: Headers) -> bool:
    """Whether shapes and dtypes match this layout."""
    return float4.holds_codes(headers, _FP4) or float8.has_scale(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    if float8.holds_codes(headers):
        return float8.packed_shapes(headers, spec, n, k, "weight_scale")
    factors = present(headers, pre_quant_scale=(k,))
    if spec.table is None:
        return modelopt_int4.packed_shapes(headers, spec, n, k) | factors
    return float4.packed_shapes(headers, spec, n, k, _FP4) | factors


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for headers of another layout."""
    if float8.holds_codes(headers):
        return float8.dimensions(headers, spec)
    if spec.table is None:
        return modelopt_int4.dimensions(headers, spec)
    return float4.dimensions(headers, spec, _FP4)


def supports(spec: QuantSpec) -> str | None:
    """Return why the files cannot hold ``spec``, or None."""
    return modelopt_config.unwritable(spec)


def shape_problem(spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear of N x K cannot be written, or None: readers want whole groups of 4-bit floats."""
    if spec.table is not None and k % spec.group_size:
        return f"its {k} inputs are no multiple of {spec.group_size}"
    return None


def word_shape(spec: QuantSpec) -> tuple[int, int]:
    """Return how many inputs and outputs share a packed byte and cannot be split."""
    return (1 if spec.table is None else 2), 1


def scale_dtype(spec: QuantSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scales before they are rounded: float32, regardless of ``dtype``, that of other tensors."""
    return torch.float32


def readers(format: str, schemes: Collection[str], experts: bool) -> Readers:
    """Describe how other programs read a model with these schemes; ``experts``: whether it has any."""
    return Readers(vllm=True, vllm_note="On GPUs.")


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors, suffix -> tensor; see ``read`` of float4, float8 and modelopt_int4."""
    stored = tensors.get("weight")
    if stored is not None and stored.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return float8.read(tensors, spec, name)
    if spec.table is None:
        weight = modelopt_int4.read(tensors, spec, name)
    else:
        weight = float4.read(tensors, spec, name, _FP4)
    return replace(weight, factors=modelopt_int4.read_factors(tensors, weight.k, name))


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of one linear; see ``float4.write`` and ``float8.write``."""
    if spec.float8 is not None:
        return float8.write(weight, spec, dtype, "weight_scale")
    return float4.write(weight, spec, dtype, _FP4)
