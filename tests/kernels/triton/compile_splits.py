"""The kernels beside decoding attention, for compile_all.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from compiling import Compiled
from triton.runtime.jit import MockTensor

from aiakq.kernels.triton import attention_blocks, attention_kernel


def split_kernels(
    arch: int, compiled: Callable[..., Compiled | None], described: Callable[..., dict[str, Any] | None]
) -> Iterator[dict[str, Any] | None]:
    """What divides decoding sequences, per sequence that is read at once, and what adds up their splits."""
    x, floats, numbers = MockTensor(torch.bfloat16), MockTensor(torch.float32), MockTensor(torch.int32)
    made = compiled(
        attention_kernel.split_kernel, arch, numbers, numbers, numbers, 64, 33, TILE=64, WINDOW=0, CHUNK=0,
        SPLITS=attention_blocks.MAX_SPLITS, BLOCK=256, num_warps=2,
    )  # fmt: skip
    yield described("splits", "row", arch, 1, made, 256 / 64, None)
    made = compiled(
        attention_kernel.combine_kernel, arch, floats, floats, numbers, floats, x, 4096, H=32, D=128, WIDTH=128,
        SPLITS=attention_blocks.MAX_SPLITS, SINKS=False, SEVERAL=True, num_warps=4,
    )  # fmt: skip
    yield described("combine", "row", arch, 1, made, 8 * 128 / 128, None)
