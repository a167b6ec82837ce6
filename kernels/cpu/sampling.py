"""Tokens from logits in the native library, without sorting the vocabulary; see src/sampling_kernel.cpp.

The caller makes ``choices(R)``, fills in what it asks of each row of logits, and calls ``choose``.
"""

from __future__ import annotations

import ctypes
from ctypes import Array, Structure

import torch
from torch import Tensor

from aiakq.kernels import cpu
from aiakq.kernels.cpu import library
from aiakq.kernels.types import SamplingProblem

#: Bytes of logits of all rows from which several threads choose.
SHARED_FROM = 1 << 17

# Kept from step to step: megabytes for a large vocabulary.
_scratch = torch.empty(0, dtype=torch.uint8)


def supports(problem: SamplingProblem) -> str | None:
    """None, or why not."""
    if problem.dtype != torch.float32:
        return f"logits are float32, not {problem.dtype}"
    return cpu.unsupported(problem.device)


def choices(count: int) -> Array[Structure]:
    """``count`` requests, all of whose fields are 0."""
    return (library.load_library().structs["SampleRow"] * count)()


def top_buffers(asked: Array[Structure]) -> tuple[Tensor, Tensor]:
    """Room for the most likely tokens of all rows, one after the other as their ``count`` says: ids and values."""
    total = sum(choice.count for choice in asked)
    ids, values = torch.empty(total, dtype=torch.int32), torch.empty(total, dtype=torch.float32)
    at = 0
    for choice in asked:
        if choice.count:
            choice.top_ids, choice.top_values = ids.data_ptr() + 4 * at, values.data_ptr() + 4 * at
            at += choice.count
    return ids, values


def choose(asked: Array[Structure], vocabulary: int) -> None:
    """Answer ``asked``, which is modified: see SampleRow in src/ops.def. Logits are float32, rows of ``vocabulary``."""
    global _scratch
    threads = torch.get_num_threads() if len(asked) * vocabulary * 4 >= SHARED_FROM else 1
    threads = min(threads, len(asked))
    needed = threads * (-(-vocabulary // 8) * 8 * 16 + 1024)
    if _scratch.numel() < needed:
        _scratch = library.allocate_scratch(needed)
    op = library.new_op("sample")
    op.m, op.vocabulary, op.rows, op.scratch = len(asked), vocabulary, ctypes.addressof(asked), _scratch.data_ptr()
    library.OpList(op)(threads)
