"""The kernels of weights in 8-bit floats, for compile_all.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from compiling import Compiled
from triton.runtime.jit import MockTensor

from aiakq.kernels.triton import linear_floats, linear_floats_kernel

K, N = 4096, 4096
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def float_code_kernels(
    arch: int, compiled: Callable[..., Compiled | None], described: Callable[..., dict[str, Any] | None],
    launches: Callable[..., list[tuple[str, list[Any]]]], tensor_core: Callable[..., str],
    is_split: Callable[..., bool],
) -> Iterator[dict[str, Any] | None]:  # fmt: skip
    """Of 8 bits: scales in groups of 128, and one per output."""
    for dtype, group in (
        (dtype, group) for dtype in (("bf16", "fp16") if arch == 90 else ("bf16",)) for group in (128, K)
    ):
        for most, (bn, bm, warps, stages, *words) in launches(arch, "float_codes", 8):
            x, floats = MockTensor(DTYPES[dtype]), MockTensor(torch.float32)
            made = compiled(
                linear_floats_kernel.float_codes_kernel, arch, x, MockTensor(torch.int16), floats, floats, x, x, floats,
                MockTensor(torch.int32), K, N, 7, N, **float_codes(arch, dtype, group, words), BN=bn, BM=bm,
                SPLIT=4 if is_split(most, words) else 1, STAGES=stages, BIAS=False, num_warps=warps,
            )  # fmt: skip
            kind = "fp8a16 g128" if group < K else "fp8a16"
            matrix = tensor_core(arch, warps)
            yield described(f"{kind} {dtype} m{most}", kind, arch, int(most), made, bn * 128 / (warps * 32), matrix)


def decoding_kernel(
    arch: int, compiled: Callable[..., Compiled | None], described: Callable[..., dict[str, Any] | None]
) -> Iterator[dict[str, Any] | None]:
    """Instructions of all of it, per decoded weight."""
    constants = float_codes(arch, "bf16", 128, [])
    del constants["SCALE_FIRST"], constants["JOINED"]
    scales = MockTensor(torch.float32)
    made = compiled(
        linear_floats_kernel.decode_codes_kernel, arch, MockTensor(torch.int16), scales, scales,
        MockTensor(torch.bfloat16), N, **constants, num_warps=4,
    )  # fmt: skip
    yield described("decode fp8", "row", arch, 1, made, 64, None)


def float_codes(arch: int, dtype: str, group: int, words: list[str | int]) -> dict[str, int | bool]:
    """Constants of e4m3 in steps of 128 inputs."""
    return {
        "N_PADDED": N, "STEPS": K // 128, "GROUP": group, "BITS": 8, "MANTISSA": 3, "SCALES": linear_floats.FLOAT32,
        "BKP": 64, "SCALE_FIRST": False, "JOINED": "joined" in words, "HARDWARE": arch >= 89 and dtype == "fp16",
        "PLAIN": False,
    }  # fmt: skip
