"""Tokens from logits: which implementation does it. The reference is the executor's sampler itself, in torch.

An implementation is a module with

    supports(problem: SamplingProblem) -> None, or one sentence why not

and the functions of kernels/cpu/sampling.py: requests for rows of logits, and one call that answers them.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from aiakq.kernels.registry import Registry
from aiakq.kernels.selection import VARIABLE, select
from aiakq.kernels.types import SamplingProblem

IMPLEMENTATIONS = Registry(
    "aiakq.implementations.sampling",
    {"cpu": "aiakq.kernels.cpu.sampling", "torch": "aiakq.kernels.ops.sampling"},
    plugins_first=True,
)


def supports(problem: SamplingProblem) -> str | None:
    """None: the reference supports every problem."""
    return None


def implementation(dtype: torch.dtype, device: torch.device) -> str:
    """The name of the implementation for logits of ``dtype`` on ``device``."""
    return _selected(dtype, device.type, os.environ.get(VARIABLE))


@lru_cache
def _selected(dtype: torch.dtype, device: str, allowed: str | None) -> str:
    """``allowed`` is looked at by ``select``; it is here so that a change of it counts."""
    return select("sampling", IMPLEMENTATIONS, SamplingProblem(dtype, device))[0].name
