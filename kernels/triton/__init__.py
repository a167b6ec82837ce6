"""Triton kernels for NVIDIA GPUs. Importing this does not query the GPU; Triton is imported at the first launch."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch

from aiakq.kernels.selection import KernelProblem

# Products and sums are fused as in every Triton so far; from 3.10 on the default is not to fuse them.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

DTYPES = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Return None if Triton can be imported, else the remedy."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed: pip install triton"


def unavailable_reason(family: str) -> str | None:
    """Return why Triton's kernels of ``family`` (self_test.FAMILIES) are not used on this machine's GPU, or None; also
    None without a GPU.
    """
    if missing() or not torch.cuda.is_available():
        return missing()
    from aiakq.kernels.triton import self_test

    return self_test.verdict(torch.cuda.current_device(), family).failure


def unsupported(problem: KernelProblem) -> str | None:
    """Return why no Triton kernel can run, or None."""
    return missing()


def unsupported_dtype(family: str, problem: KernelProblem) -> str | None:
    """Return why Triton's kernels of ``family`` do not support the activations of ``problem``, or None."""
    if problem.dtype not in DTYPES:
        return f"activations are float16 or bfloat16, not {problem.dtype}"
    return unavailable_reason(family)
