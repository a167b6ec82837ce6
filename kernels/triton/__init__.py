"""Kernels in Triton, for NVIDIA GPUs. Importing this queries nothing; Triton is imported at the first launch."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch

from aiakq.kernels.selection import OtherDevice

DTYPES = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=1)
def missing() -> str | None:
    """None if Triton can be imported, or what to do."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed: pip install triton"


def unavailable_reason() -> str | None:
    """None, or why Triton's kernels are not used on this machine's GPU: see self_test.py. Without a GPU: None."""
    if missing() or not torch.cuda.is_available():
        return missing()
    from aiakq.kernels.triton import self_test

    return self_test.failure(torch.cuda.current_device())


def other_device(device: str) -> OtherDevice | None:
    """None for GPUs, or that Triton's kernels do not run on this kind of device."""
    return None if device == "cuda" else OtherDevice("it runs on NVIDIA GPUs")


def unsupported(device: str, dtype: torch.dtype) -> str | None:
    """Why activations of ``dtype`` on this kind of device are not computed on by Triton's kernels, or None."""
    if dtype not in DTYPES:
        return other_device(device) or f"activations are float16 or bfloat16, not {dtype}"
    return other_device(device) or unavailable_reason()
