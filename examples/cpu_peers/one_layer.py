"""Measure one linear layer without an engine: our kernels and torch's, in GB/s of weights and GOP/s of products.

Up to 16 rows, every call uses another copy of the weights, so that they are read from memory as in a model.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from aiakq.system.threads import spin_briefly

spin_briefly(os.environ)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from aiakq.kernels.types import QWeight  # noqa: E402

N, K, GROUP = 8192, 2048, 128
ROWS = (1, 4, 16, 128, 512)
#: Bytes that do not fit into any cache.
BEYOND_CACHES = 192 * 2**20
SECONDS = 0.4

#: A function that multiplies x [M, K], and the bytes of its weights.
Product = tuple[Callable[[Tensor], Any], int]


def main() -> None:
    """``one_layer.py REQUEST RESULT``, as in timing.py."""
    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    table = []
    with torch.inference_mode():
        for name, dtype, make in contestants():
            try:
                table += [{"name": name, **cell} for cell in measure(dtype, make)]
            except Exception as problem:
                table.append({"name": name, "failed": f"{type(problem).__name__}: {problem}".splitlines()[0][:160]})
    Path(sys.argv[2]).write_text(json.dumps({"table": table, "versions": {"torch": torch.__version__}}))


def measure(dtype: torch.dtype, make: Callable[[], Product]) -> Iterator[dict[str, Any]]:
    """Milliseconds of one product for each count of rows: medians of passes over all copies."""
    first = make()
    copies = [first, *(make() for _ in range(-(-BEYOND_CACHES // first[1]) - 1))]
    for m in ROWS:
        x = torch.randn(m, K).to(dtype)
        used = copies if m <= 16 else copies[:1]
        used[0][0](x)
        times: list[float] = []
        until = time.perf_counter() + SECONDS
        while not times or (time.perf_counter() < until and len(times) < 25):
            began = time.perf_counter()
            for product, _ in used:
                product(x)
            times.append((time.perf_counter() - began) / len(used))
        yield {"m": m, "ms": statistics.median(times) * 1e3, "bytes": first[1]}


def contestants() -> Iterator[tuple[str, torch.dtype, Callable[[], Product]]]:
    """Name, dtype of x, and a function that makes a product with new weights."""
    for name, bits, exact in (
        ("W4A16 g128", 4, False),
        ("W4A16 g128, exact", 4, True),
        ("W8A16", 8, False),
        ("W8A16, exact", 8, True),
        ("W3A16 g128", 3, False),
        ("W3A16 g128, exact", 3, True),
        ("W2A16 g128", 2, False),
        ("W2A16 g128, exact", 2, True),
    ):
        yield f"aiakq {name}", torch.float32, partial(ours, f"w{bits}a16", bits, exact)
    yield "aiakq W8A8", torch.float32, partial(ours, "w8a8", 8, False)
    yield "torch F.linear fp32", torch.float32, partial(dense, torch.float32)
    yield "torch F.linear bf16", torch.bfloat16, partial(dense, torch.bfloat16)
    for engine in ("fbgemm", "onednn"):
        if engine in torch.backends.quantized.supported_engines:
            yield f"torch linear_dynamic int8, {engine}", torch.float32, partial(dynamic, engine)
    yield "torch _weight_int8pack_mm", torch.bfloat16, int8
    yield "torch _weight_int4pack_mm g128", torch.bfloat16, int4


def ours(scheme: str, bits: int, exact: bool) -> Product:
    from aiakq.kernels import cpu
    from aiakq.kernels.cpu import linear

    size = K if bits == 8 else GROUP
    codes = torch.randint(0, 2**bits, (N, K), dtype=torch.uint8)
    scales = torch.rand(N, K // size) * 0.01 + 0.001
    weight = QWeight(scheme, codes, scales if scheme == "w8a8" else scales.half(), group_size=size)
    problem = weight.problem(torch.float32, "cpu", exact)
    reason = cpu.unsupported(problem)
    if reason:
        raise RuntimeError(reason)
    state = linear.prepare(weight, problem)
    return state, N * K * bits // 8 + weight.scales.nbytes


def dense(dtype: torch.dtype) -> Product:
    weight = torch.randn(N, K).to(dtype)
    return lambda x: torch.nn.functional.linear(x, weight), weight.nbytes


def dynamic(engine: str) -> Product:
    torch.backends.quantized.engine = engine
    scales, zeros = torch.full((N,), 0.03, dtype=torch.float64), torch.zeros(N, dtype=torch.int64)
    weight = torch.quantize_per_channel(torch.randn(N, K), scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed), N * K


def int8() -> Product:
    weight, scales = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N).bfloat16()
    return lambda x: torch._weight_int8pack_mm(x, weight, scales), N * K


def int4() -> Product:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (N, K), dtype=torch.int32), 1)
    scales = torch.rand(K // GROUP, N, 2).bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales), N * K // 2 + scales.nbytes


if __name__ == "__main__":
    main()
