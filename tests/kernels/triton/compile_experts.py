"""The kernels of mixtures of experts, for compile_all.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from compile_floats import Kind
from compiling import Compiled
from triton.runtime.jit import MockTensor

from aiakq.kernels.triton import experts, experts_kernel, linear
from aiakq.kernels.triton.float_scales import E8M0

K, N = 4096, 4096
#: Small floats; those of 4 bits with the number of inputs of GPT-OSS.
FLOATS = {"fp8a16": Kind(8, 128), "mxfp4": Kind(4, 32, E8M0, 2880)}
#: Name -> bits, the table with its launches, and the inputs of a step.
KINDS = {
    **{name: (kind.bits, "float_codes", kind.step) for name, kind in FLOATS.items()},
    "w4a16": (4, "grouped", 128),
    "bf16": (16, "floats", 64),
    "w8a8": (8, "integers", 128),
}


def expert_kernels(
    arch: int, compiled: Callable[..., Compiled | None], described: Callable[..., dict[str, Any] | None],
    launches: Callable[..., list[tuple[str, list[Any]]]], tensor_core: Callable[..., str],
) -> Iterator[dict[str, Any] | None]:  # fmt: skip
    """Of products with the sizes of Llama 3, eight experts per token."""
    for kind, (bits, table, step) in KINDS.items():
        for most, entry in launches(arch, table, bits):
            bn, bm, warps, stages, *words = entry
            common = {"SHARE": 8, "BN": bn, "BM": bm, "STAGES": stages, "BIAS": False, "num_warps": warps}
            made = compiled(*_product(kind, arch), **_constants(kind, arch, words), **common)
            matrix = tensor_core(arch, warps, kind == "w8a8")
            weights = bn * step / (warps * 32)
            yield described(f"experts {kind} m{most}", "experts", arch, int(most), made, weights, matrix)
    yield from _sort_and_sum(arch, compiled, described)


def _product(kind: str, arch: int) -> tuple[Any, ...]:
    x, floats, codes = MockTensor(torch.bfloat16), MockTensor(torch.float32), MockTensor(torch.int8)
    numbers, words = MockTensor(torch.int32), MockTensor(torch.int16)
    if kind == "w4a16":
        inputs = (x, floats, numbers, numbers, words, numbers, floats, x, x, K, 1024, N, 7, N)
        return (experts_kernel.experts_words_kernel, arch, *inputs)
    if kind in FLOATS:
        inputs = (x, numbers, numbers, words, FLOATS[kind].scale_tensor(), floats, x, x, FLOATS[kind].k, N, 7, N)
        return (experts_kernel.experts_codes_kernel, arch, *inputs)
    if kind == "bf16":
        return experts_kernel.experts_floats_kernel, arch, x, numbers, numbers, x, x, x, K, N, 7, N, K // 64
    inputs = (codes, floats, numbers, numbers, codes, floats, x, x, N, 7, N, K // 128)
    return (experts_kernel.experts_integers_kernel, arch, *inputs)


def _constants(kind: str, arch: int, words: list[str | int]) -> dict[str, Any]:
    if kind == "w4a16":
        switches = {"SCALE_FIRST": "scale_first" in words, "JOINED": "joined" in words, "PLAIN": False}
        plane = linear.inputs_per_plane(K, 128, 4)
        return {"N_PADDED": N, "STEPS": K // 128, "GROUP": 128, "BITS": 4, "BKP": plane, **switches}
    if kind in FLOATS:
        own = FLOATS[kind]
        rows = own.k // own.group if own.bits == 8 else -(-own.k // own.group // 4)
        return own.constants(arch, "bf16", words) | {"GROUPS": rows}
    if kind == "bf16":
        return {"K": K, "BK": 64}
    return {"N_PADDED": N, "K": K, "BK": 128, "WEIGHTS_LEFT": "weights_left" in words}


def _sort_and_sum(
    arch: int, compiled: Callable[..., Compiled | None], described: Callable[..., dict[str, Any] | None]
) -> Iterator[dict[str, Any] | None]:
    """Instructions of all of it, per pair of a tile or per output."""
    x, floats, numbers = MockTensor(torch.bfloat16), MockTensor(torch.float32), MockTensor(torch.int32)
    pairs, tile = MockTensor(torch.int64), experts.TILE
    made = compiled(experts_kernel.experts_count_kernel, arch, pairs, numbers, 0, 7, TILE=tile, num_warps=4)
    yield described("experts counted", "row", arch, 1, made, tile / 128, None)
    made = compiled(
        experts_kernel.experts_place_kernel, arch, pairs, numbers, numbers, numbers, 0, 7, 7, COUNT=128, EXPERTS=128,
        BM=16, TILE=tile, num_warps=4,
    )  # fmt: skip
    yield described("experts placed", "row", arch, 1, made, tile / 128, None)
    made = compiled(
        experts_kernel.experts_sum_kernel, arch, x, pairs, floats, floats, N, 0, 128, TOP=8, SLOTS=8, WEIGHTED=True,
        BLOCK=1024, num_warps=2,
    )  # fmt: skip
    yield described("experts summed", "row", arch, 1, made, 1024 / 64, None)
