"""Kernels in Triton, for NVIDIA GPUs. Imported only where they run: nothing here is queried or tuned at import."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=1)
def missing() -> str | None:
    """None if Triton can be imported, or what to do."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed: pip install triton"


def trouble() -> str | None:
    """None, or why its kernels are not used on this machine's GPU; without a GPU there is nothing to find out."""
    if missing() or not torch.cuda.is_available():
        return missing()
    from aiakq.kernels.triton import self_test as trial

    return trial.failure(torch.cuda.current_device())


def usable(x: Tensor) -> bool:
    """Whether activations like ``x`` are computed on here."""
    return x.is_cuda and x.dtype in DTYPES and _no_trouble()


@lru_cache(maxsize=1)
def _no_trouble() -> bool:
    return trouble() is None
