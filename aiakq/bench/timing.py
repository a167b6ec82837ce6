"""Time calls on a device, and measure its peak bandwidth and throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

#: Bytes of distinct weights to cycle through, more than the caches hold.
ROTATED = {"cuda": 2**29, "cpu": 2**28}
#: On a CPU: seconds to measure for, minimum and maximum number of rounds.
SECONDS, MIN_ROUNDS, MAX_ROUNDS = 0.2, 3, 200

Call = Callable[[], object]


def copies(device: torch.device, nbytes: float) -> int:
    """Return the number of copies of a weight of ``nbytes`` to cycle through, so that each call finds cold caches."""
    return max(1, min(48, int(ROTATED[device.type] / max(nbytes, 1))))


def microseconds(calls: Sequence[Call], device: torch.device, repeats: int = 7) -> float:
    """Return the median microseconds per call over rounds of all ``calls``, which a GPU replays as a CUDA graph."""
    return _on_gpu(calls, repeats) if device.type == "cuda" else _on_cpu(calls)


def _on_gpu(calls: Sequence[Call], repeats: int) -> float:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return median(times)


def _on_cpu(calls: Sequence[Call]) -> float:
    for call in calls:
        call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < MIN_ROUNDS or (len(times) < MAX_ROUNDS and time.perf_counter() - began < SECONDS):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) * 1e6 / len(calls))
    return median(times)


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure memory bandwidth (GB/s) and the TFLOP/s and TOP/s of large matmuls in ``dtype`` and int8 with torch.

    Bandwidth is that of a read, or on a GPU of a copy if that is faster.
    """
    on_gpu = device.type == "cuda"
    large = torch.ones(2**28 if on_gpu else 2**26, device=device)
    other = torch.empty_like(large) if on_gpu else large
    read = nbytes(large) / microseconds([large.sum], device)
    copied = 2 * nbytes(large) / microseconds([lambda: other.copy_(large)], device) if on_gpu else 0.0
    size = 8192 if on_gpu else 1024
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    c, d = (torch.randint(-9, 9, (size, size), dtype=torch.int8, device=device) for _ in range(2))
    work = 2 * size**3 / 1e6
    return {
        "gbps": max(read, copied) / 1e3,
        "float_tflops": work / microseconds([lambda: a @ b], device),
        "int8_tops": work / microseconds([lambda: torch._int_mm(c, d.t())], device),
    }


def nbytes(*tensors: Tensor) -> int:
    """Return the total size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
