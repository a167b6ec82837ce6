"""Memory that the system clears when it is first written."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import pytest
import torch

from aiakq.kernels.cpu import memory

SIZE = 256 * 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_zeros_take_memory_only_when_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", -1)  # as on an old Linux
    before = resident()
    cache = memory.zeros_on_large_pages(8, SIZE // 16, dtype=torch.bfloat16)
    assert cache.nbytes == SIZE and resident() - before < SIZE // 4
    cache[3].fill_(1)
    assert (int(cache[2].count_nonzero()), int(cache[3].count_nonzero())) == (0, SIZE // 16)
    del cache
    assert resident() - before < SIZE // 4


@pytest.mark.skipif(
    sys.platform != "linux" or [int(part) for part in platform.release().split(".")[:2]] < [5, 14],
    reason="Linux 5.14 commits memory on advice",
)
def test_zeros_are_committed_beside_what_writes_them() -> None:
    size = 2**25  # the thread has the lowest priority
    before = resident()
    cache = memory.zeros_on_large_pages(size, dtype=torch.int8)
    cache[5] = 7
    until = time.monotonic() + 300
    while resident() - before < size * 0.9 and time.monotonic() < until:
        time.sleep(0.01)
    assert resident() - before >= size * 0.9
    assert int(cache.sum(dtype=torch.int64)) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_was_released_is_not_committed() -> None:
    before = resident()
    for _ in range(40):
        memory.zeros_on_large_pages(SIZE, dtype=torch.int8)
        assert resident() - before < SIZE // 2


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (2**21 + 1,)])
def test_zeros_of_any_size(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        cache = memory.zeros_on_large_pages(*shape, dtype=dtype)
        assert (cache.shape, cache.dtype, cache.is_contiguous()) == (shape, dtype, True)
        assert not cache.view(torch.uint8).any()
