"""The part of a Format that is the same for layouts which aiakq reads and does not write."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.formats.checks import mismatch
from aiakq.formats.config_values import unsupported
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec


def supports(spec: QuantSpec) -> str | None:
    """Return why the files cannot hold ``spec``."""
    return "aiakq reads such files, and does not write them"


def scale_dtype(spec: QuantSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of stored scales: that of other tensors."""
    return dtype


def to_config(spec: QuantSpec) -> dict[str, object]:
    """Raise ``format_unsupported``."""
    raise unsupported(f"{spec.format}, which is read and not written")


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Raise ``tensor_mismatch``."""
    raise mismatch("linear", f"weight cannot be written: files of {spec.format} are only read")
