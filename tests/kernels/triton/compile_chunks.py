"""The kernels of recurrences in chunks, for compile_all.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from compiling import Compiled
from triton.runtime.jit import MockTensor

from aiakq.kernels.recurrent_types import RecurrenceSpec
from aiakq.kernels.triton.recurrence import chunk_config_of, chunk_constants
from aiakq.kernels.triton.recurrence_chunks_kernel import chunk_kernel, scan_kernel


def chunked_kernels(
    arch: int,
    compiled: Callable[..., Compiled | None],
    described: Callable[..., dict[str, Any] | None],
    launches: Callable[..., list[tuple[str, list[Any]]]],
    tensor_core: Callable[..., str],
) -> Iterator[dict[str, Any] | None]:
    """Recurrences in chunks; instructions per element of a token's keys, of all of chunk_kernel, and of scan_kernel's
    loop per element of a state.
    """
    floats, numbers, halves = MockTensor(torch.float32), MockTensor(torch.int32), MockTensor(torch.bfloat16)
    sizes = {"delta_rule": (32, 16, 128, 128), "state_space": (80, 1, 128, 64)}
    for kind, dtype in itertools.product(sizes, (torch.bfloat16, torch.float16) if arch < 100 else (torch.bfloat16,)):
        spec = RecurrenceSpec(kind, *sizes[kind], torch.empty(0), torch.empty(0))
        ((_, entry),) = launches(arch, kind, 16)
        config, x = chunk_config_of(entry, spec, dtype), MockTensor(dtype)
        constants, name = chunk_constants(spec, config), kind.replace("_", " ") + " fp16" * (dtype == torch.float16)
        made = compiled(
            chunk_kernel, arch, x, x, *[floats] * 2, numbers, floats, halves, 2048, 8192, 64, 0.0, 1.0, 0.1, 1e-6,
            LEVELS=config.tokens.bit_length() - 1, **constants, num_warps=config.chunk_warps,
        )  # fmt: skip
        elements = config.tokens * 128 / (config.chunk_warps * 32)
        yield described(f"{name}, chunks", "recurrent", arch, 1, made, elements, None)
        made = compiled(
            scan_kernel, arch, x, *[floats] * 2, *[numbers] * 3, floats, halves, x, 2048, 8192, BLOCK=config.columns,
            SKIP=kind == "state_space", STAGES=config.stages, **constants, num_warps=config.warps,
        )  # fmt: skip
        elements, matrix = 128 * config.columns / (config.warps * 32), tensor_core(arch, config.warps)
        yield described(f"{name}, scan", "recurrent", arch, config.tokens, made, elements, matrix)
