"""FP8 of DeepSeek, Qwen, Mistral, AutoFP8, FBGEMM and ModelOpt: ``quant_method`` fp8 and fbgemm_fp8.

The tensors of a linear are described in float8.py: scales are called ``weight_scale_inv`` for blocks and
``weight_scale`` otherwise. The configs are read by fp8_config.py. compressed-tensors stores the same tensors under its
own config (compressed_tensors.py), and so does ModelOpt (modelopt_config.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from aiakq.formats import float8, fp8_config
from aiakq.formats.compatibility import Readers
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

SUFFIXES = float8.SUFFIXES
QUANT_METHODS = fp8_config.METHODS
RECORDS_METHOD = False
WIDTH_MULTIPLE = 128
from_config = fp8_config.from_config
to_config = fp8_config.to_config


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a linear with 8-bit floats, even if some tensors are missing."""
    return float8.holds_codes(headers)


def matches(headers: Headers) -> bool:
    """Whether shapes and dtypes match this layout."""
    return float8.has_scale(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    return float8.packed_shapes(headers, spec, n, k, _scale_name(spec))


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for headers of another layout."""
    return float8.dimensions(headers, spec)


def supports(spec: QuantSpec) -> str | None:
    """Return why the files cannot hold ``spec``, or None."""
    if spec.float8 is None:
        return "such files hold 8-bit floats"
    return fp8_config.unwritable(spec)


def scale_dtype(spec: QuantSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of stored scales: float32, regardless of ``dtype``, that of other tensors."""
    return torch.float32


def readers(format: str, schemes: Collection[str], experts: bool) -> Readers:
    """Describe how other programs read a model with these schemes; ``experts``: whether it has any."""
    return Readers(vllm=True, vllm_note="On GPUs.")


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors, suffix -> tensor; see ``float8.read``."""
    return float8.read(tensors, spec, name)


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of one linear; see ``float8.write``."""
    return float8.write(weight, spec, dtype, _scale_name(spec))


def _scale_name(spec: QuantSpec) -> str:
    blocks = spec.float8 is not None and spec.float8.rows > 1
    return "weight_scale_inv" if blocks else "weight_scale"
