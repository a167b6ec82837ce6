"""Masks of a vocabulary and greedy rows, for compile_all.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from compiling import Compiled
from triton.runtime.jit import MockTensor

from aiakq.kernels.triton.sampling import WIDTH, WORDS
from aiakq.kernels.triton.sampling_kernel import greedy_kernel, greedy_parts_kernel, mask_kernel


def sampling_kernels(
    arch: int, compiled: Callable[..., Compiled | None], described: Callable[..., dict[str, Any] | None]
) -> Iterator[dict[str, Any] | None]:
    """Masks and greedy rows of a vocabulary of 151,936 tokens; instructions per token."""
    made = compiled(
        mask_kernel, arch, MockTensor(torch.float32), MockTensor(torch.int64), MockTensor(torch.int32), 151936, 4748,
        151936, WORDS=WORDS, num_warps=4,
    )  # fmt: skip
    yield described("mask", "row", arch, 1, made, 32 * WORDS / (4 * 32), None)
    floats, numbers, count = MockTensor(torch.float32), MockTensor(torch.int32), -(-151936 // WIDTH)
    made = compiled(
        greedy_parts_kernel, arch, floats, floats, floats, numbers, 151936, 151936, 151936, SAME=True, WIDTH=WIDTH,
        num_warps=4,
    )  # fmt: skip
    yield described("greedy", "row", arch, 1, made, WIDTH / (4 * 32), None)
    made = compiled(
        greedy_kernel, arch, floats, floats, numbers, MockTensor(torch.int64), floats, floats,
        151936, count, PARTS=64, num_warps=1,
    )  # fmt: skip
    yield described("greedy, combined", "row", arch, 1, made, 64 / 32, None)
