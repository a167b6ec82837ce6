"""The kernels of weights in floats of 8 and 4 bits, for compile_all.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from compiling import Compiled
from triton.runtime.jit import MockTensor

from aiakq.kernels.triton import linear, linear_floats_kernel
from aiakq.kernels.triton.float_scales import E4M3, E8M0, FLOAT32

K, N = 4096, 4096
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Kind:
    """Floats of ``bits`` with a scale stored as ``scales`` for each ``group`` of ``k`` inputs."""

    bits: int
    group: int
    scales: int = FLOAT32
    k: int = K

    @property
    def plane(self) -> int:
        found = linear.inputs_per_plane(self.k, self.group, self.bits)
        assert found is not None
        return found

    @property
    def step(self) -> int:
        return self.plane * 16 // self.bits

    def constants(self, arch: int, dtype: str, words: list[str | int]) -> dict[str, int | bool]:
        """As ``linear_floats.constants``."""
        scale_first = "scale_first" in words and self.scales != FLOAT32
        return {
            "N_PADDED": N, "STEPS": self.k // self.step, "GROUP": self.group, "BITS": self.bits,
            "MANTISSA": 3 if self.bits == 8 else 1, "SCALES": self.scales, "BKP": self.plane,
            "SCALE_FIRST": scale_first, "JOINED": "joined" in words and (scale_first or self.group >= self.step),
            "HARDWARE": self.bits == 8 and arch >= 89 and dtype == "fp16", "PLAIN": False,
        }  # fmt: skip

    def scale_tensor(self) -> MockTensor:
        return MockTensor(torch.float32 if self.scales == FLOAT32 else torch.int32)


KINDS = {
    "fp8a16 g128": Kind(8, 128),
    "fp8a16": Kind(8, K),
    "mxfp4": Kind(4, 32, E8M0),
    "nvfp4": Kind(4, 16, E4M3),
}


def float_code_kernels(
    arch: int, compiled: Callable[..., Compiled | None], described: Callable[..., dict[str, Any] | None],
    launches: Callable[..., list[tuple[str, list[Any]]]], tensor_core: Callable[..., str],
    is_split: Callable[..., bool],
) -> Iterator[dict[str, Any] | None]:  # fmt: skip
    """Scales in groups, and one per output."""
    for name, kind in KINDS.items():
        for most, (bn, bm, warps, stages, *words) in launches(arch, "float_codes", kind.bits):
            for dtype in ("bf16", "fp16") if arch == 90 else ("bf16",):
                x, floats = MockTensor(DTYPES[dtype]), MockTensor(torch.float32)
                made = compiled(
                    linear_floats_kernel.float_codes_kernel, arch, x, MockTensor(torch.int16), kind.scale_tensor(),
                    floats, x, x, floats, MockTensor(torch.int32), K, N, 7, N, **kind.constants(arch, dtype, words),
                    BN=bn, BM=bm, SPLIT=4 if is_split(most, words) else 1, STAGES=stages, BIAS=False, num_warps=warps,
                )  # fmt: skip
                weights, matrix = bn * kind.step / (warps * 32), tensor_core(arch, warps)
                yield described(f"{name} {dtype} m{most}", name, arch, int(most), made, weights, matrix)


def decoding_kernel(
    arch: int, compiled: Callable[..., Compiled | None], described: Callable[..., dict[str, Any] | None]
) -> Iterator[dict[str, Any] | None]:
    """Instructions of all of it, per decoded weight."""
    for name, kind in (("fp8", KINDS["fp8a16 g128"]), ("mxfp4", KINDS["mxfp4"])):
        constants = kind.constants(arch, "bf16", [])
        del constants["SCALE_FIRST"], constants["JOINED"]
        made = compiled(
            linear_floats_kernel.decode_codes_kernel, arch, MockTensor(torch.int16), kind.scale_tensor(),
            MockTensor(torch.float32), MockTensor(torch.bfloat16), N, **constants, num_warps=4,
        )  # fmt: skip
        yield described(f"decode {name}", "row", arch, 1, made, 64 * kind.step / 128, None)
