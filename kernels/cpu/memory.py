"""Memory for what every step reads, weights and KV cache, on huge pages where the system has them."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import queue
import sys
import threading
import weakref
from ctypes import c_size_t, c_void_p
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_LARGE_PAGE, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 2**21, 14, 23
#: Bytes that are committed at once.
_SLICE = 2**25


def empty_on_large_pages(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate [*shape] of ``dtype``, contiguous and uninitialized.

    Huge pages, because hardware prefetching stops at page boundaries, and a TLB miss costs twice as much in a virtual
    machine.
    """
    tensor = torch.empty(shape, dtype=dtype)
    first = -(-tensor.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    _advise(first, (tensor.data_ptr() + tensor.nbytes - first) // _LARGE_PAGE * _LARGE_PAGE, _MADV_HUGEPAGE)
    return tensor


def zeros_on_large_pages(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate [*shape] of ``dtype``, contiguous and zero, without waiting for it to be cleared.

    The system clears a page when it is first written, and a thread of low priority has it do so from now on: other
    programs see soon how much memory is left, and clearing 0.8 GB took 1.8 s of every start. Raises OSError if the
    system has no such amount of memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if sys.platform != "linux" or size < _LARGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)  # holds a reference to ``memory``
    _advise(tensor.data_ptr(), size, _MADV_HUGEPAGE)
    _uncommitted().put(_Uncommitted(weakref.ref(memory), tensor.data_ptr(), size))
    return tensor.view(dtype).view(shape)


def _advise(address: int, size: int, advice: int) -> bool:
    """Advise the system about ``size`` bytes from a page boundary on, and return whether it does so.

    Whatever it does, everything works, only slower. Other threads run meanwhile.
    """
    function = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    return function is not None and size > 0 and function(c_void_p(address), c_size_t(size), advice) == 0


class _Uncommitted(NamedTuple):
    """Memory that may be released before it is committed."""

    memory: weakref.ref[mmap.mmap]
    address: int
    size: int

    def commit(self) -> None:
        """Have the system clear the memory, as long as anything needs it."""
        for start in range(0, self.size, _SLICE):
            memory = self.memory()
            # Advice fails on Linux before 5.14, which commits pages when they are written.
            size = min(_SLICE, self.size - start)
            if memory is None or not _advise(self.address + start, size, _MADV_POPULATE_WRITE):
                return
            del memory


@lru_cache(maxsize=1)
def _uncommitted() -> queue.SimpleQueue[_Uncommitted]:
    """Return the queue of a thread that commits memory."""
    waiting: queue.SimpleQueue[_Uncommitted] = queue.SimpleQueue()

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            waiting.get().commit()

    threading.Thread(target=run, name="commit-memory", daemon=True).start()
    return waiting


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_uncommitted.cache_clear)  # threads do not survive
