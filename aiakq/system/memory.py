"""Host memory: how much is available (cgroup limits included), and how it is released."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiakq.system import cgroups

#: Seconds between two collections of all reference cycles, and when the last one was.
_COLLECTION_SECONDS = 5.0
_last_collection = float("-inf")


def free_host_memory() -> int:
    """Bytes of RAM that can still be allocated, within the container's limit."""
    # macOS says only how much there is in all.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = cgroups.available_memory()
    return max(available if limit is None else min(available, limit), 0)


def release_host_memory() -> None:
    """Return memory that is no longer used to the system.

    Reference cycles are collected first: all of them, or, if that took place in the last seconds, young ones, since it
    scans every object there is. glibc keeps freed blocks of a few megabytes in its heap, which grows when allocation
    sizes vary; ``malloc_trim`` returns them.
    """
    global _last_collection
    if time.monotonic() - _last_collection > _COLLECTION_SECONDS:
        gc.collect()
        _last_collection = time.monotonic()
    else:
        gc.collect(1)
    trim_heap()


def trim_heap() -> None:
    """Return freed memory to the system, without collecting reference cycles."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def freeze_objects() -> None:
    """Exclude what there is, which lives as long as the process, from garbage collection."""
    gc.collect()
    gc.freeze()


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection: scanning what imports created takes a third of a second."""
    freeze_objects()
    try:
        yield
    finally:
        gc.unfreeze()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
