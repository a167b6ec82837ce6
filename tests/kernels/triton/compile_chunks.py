"""The kernels of recurrences in chunks, for compile_all.py."""

from __future__ import annotations

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
    x, floats, numbers = MockTensor(torch.bfloat16), MockTensor(torch.float32), MockTensor(torch.int32)
    for kind, heads, value_dim in (("delta_rule", (32, 16), 128), ("state_space", (80, 1), 64)):
        spec = RecurrenceSpec(kind, *heads, 128, value_dim, torch.empty(0), torch.empty(0))
        ((_, entry),) = launches(arch, kind, 16)
        config = chunk_config_of(entry, spec)
        constants, name = chunk_constants(spec, config), kind.replace("_", " ")
        made = compiled(
            chunk_kernel, arch, x, x, *[floats] * 2, numbers, floats, x, 2048, 8192, 64, 0.0, 1.0, 0.1, 1e-6,
            LEVELS=config.tokens.bit_length() - 1, **constants, num_warps=config.chunk_warps,
        )  # fmt: skip
        elements = config.tokens * 128 / (config.chunk_warps * 32)
        yield described(f"{name}, chunks", "recurrent", arch, 1, made, elements, None)
        made = compiled(
            scan_kernel, arch, x, *[floats] * 2, *[numbers] * 3, floats, x, x, 2048, 8192, BLOCK=config.columns,
            SKIP=kind == "state_space", STAGES=config.stages, **constants, num_warps=config.warps,
        )  # fmt: skip
        elements, matrix = 128 * config.columns / (config.warps * 32), tensor_core(arch, config.warps)
        yield described(f"{name}, scan", "recurrent", arch, config.tokens, made, elements, matrix)
