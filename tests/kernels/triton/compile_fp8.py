"""The kernels of FP8 weights and activations, for compile_all.py; GPUs before sm_89 have no such products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from compiling import Compiled
from triton.runtime.jit import MockTensor

from aiakq.kernels.triton import experts_kernel, linear_fp8_kernel

K, N = 4096, 4096
#: Instructions of tensor cores by architecture; those of others are the ones of sm_89.
MATRIX = {90: "QGMMA", 100: "UTCQMMA"}


def fp8_kernels(
    arch: int, compiled: Callable[..., Compiled | None], described: Callable[..., dict[str, Any] | None],
    launches: Callable[..., list[tuple[str, list[Any]]]], is_split: Callable[..., bool],
) -> Iterator[dict[str, Any] | None]:  # fmt: skip
    """Scales per output and token, and in blocks: layers, and eight experts per token."""
    if arch < 89:
        return
    codes, floats, y = MockTensor(torch.float8_e4m3fn), MockTensor(torch.float32), MockTensor(torch.bfloat16)
    numbers, matrix = MockTensor(torch.int32), MATRIX.get(arch, "QMMA")
    for name, grouped in (("fp8a8", False), ("fp8a8 blocks", True)):
        for most, (bn, bm, warps, stages, *words) in launches(arch, "fp8", 8):
            common = {
                "K": K, "N_PADDED": N, "BN": bn, "BM": bm, "BK": 128, "STAGES": stages, "BIAS": False,
                "WEIGHTS_LEFT": "weights_left" in words, "X_GROUPS": grouped, "W_GROUPS": grouped, "COMMON": grouped,
                "num_warps": warps,
            }  # fmt: skip
            weights = bn * 128 / (warps * 32)
            made = compiled(
                linear_fp8_kernel.fp8_kernel, arch, codes, floats, codes, floats, y, y, floats, numbers, N, 7, N,
                SPLIT=3 if is_split(most, words) else 1, **common,
            )  # fmt: skip
            yield described(f"{name} m{most}", name, arch, int(most), made, weights, matrix)
            made = compiled(
                experts_kernel.experts_fp8_kernel, arch, codes, floats, numbers, numbers, codes, floats, y, y, N, 7, 7,
                N, K // 128, SHARE=8, GROUPS=K // 128 if grouped else 1, **common,
            )  # fmt: skip
            yield described(f"experts {name} m{most}", "experts", arch, int(most), made, weights, matrix)
    made = compiled(
        linear_fp8_kernel.quantize_e4m3_kernel, arch, y, codes, floats, floats, K, 7, 1.0, 0.0, K=K, BLOCK=1024,
        GIVEN=False, GROUP=128, POWERS=False, num_warps=2,
    )  # fmt: skip
    yield described("rows to e4m3", "row", arch, 1, made, 1024 / 64, None)
