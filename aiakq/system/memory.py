"""Host memory: the amount available within cgroup limits, and its release to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiakq.system import cgroups

#: Minimum seconds between two full garbage collections, and the time of the last one.
_COLLECTION_SECONDS = 5.0
_last_collection = float("-inf")
_SIZE = "/proc/self/statm"
#: Whether freeze_objects was called.
_are_frozen = False
#: How many collect garbage rarely at the moment, and the thresholds before the first of them.
_threshold_lock = threading.Lock()
_num_rare = 0
_thresholds = gc.get_threshold()
_LARGEST_THRESHOLD = 2**31 - 1


def free_host_memory() -> int:
    """Return the bytes of RAM that can be allocated, within the container's limit."""
    # macOS reports only the total.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = cgroups.available_memory()
    return max(available if limit is None else min(available, limit), 0)


def limit_more_memory(num_bytes: int) -> bool:
    """Limit the memory that this process may allocate in addition to its current size.

    Returns whether a limit was set: only Linux tells the size of a process, and enforces a limit on it.
    """
    import resource

    try:
        statm = os.open(_SIZE, os.O_RDONLY)  # a file object takes twice as long, for every text of a request
    except OSError:
        return False
    try:
        num_pages = int(os.read(statm, 64).split(maxsplit=1)[0])
    finally:
        os.close(statm)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = num_pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    return True


def peak_memory_bytes() -> int:
    """Return the largest amount of RAM that this process has used."""
    import resource

    # macOS counts in bytes, Linux in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """Return the RAM that this process uses now; the largest amount so far where only that is known."""
    lines = _lines(_SIZE)
    return int(lines[0].split()[1]) * os.sysconf("SC_PAGE_SIZE") if lines else peak_memory_bytes()


def release_host_memory() -> None:
    """Return unused memory to the system.

    Garbage is collected first: in all generations or, if that happened in the last seconds, only in the young ones,
    since a full collection scans every object. glibc keeps freed blocks of a few megabytes in its heap, which grows if
    allocation sizes vary; ``malloc_trim`` returns them.
    """
    global _last_collection
    if time.monotonic() - _last_collection > _COLLECTION_SECONDS:
        gc.collect()
        _last_collection = time.monotonic()
    else:
        gc.collect(1)
    trim_heap()


def trim_heap() -> None:
    """Return freed memory to the system, without a garbage collection."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _HeapInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def heap_bytes() -> int:
    """Return the bytes allocated in the heap of the main thread; without glibc 2.33, the memory of the process."""
    heap_info = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if heap_info is None:
        lines = _lines("/proc/self/statm")
        return int(next(iter(lines)).split()[1]) * os.sysconf("SC_PAGE_SIZE") if lines else 0
    heap_info.restype = _HeapInfo
    info = heap_info()
    return int(info.uordblks + info.hblkhd)


def freeze_objects() -> None:
    """Exclude all current objects, which live as long as the process, from garbage collection."""
    global _are_frozen
    gc.collect()
    gc.freeze()
    _are_frozen = True


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection, since scanning the imported modules takes 0.3 s.

    After ``freeze_objects`` only garbage is collected, and what that froze stays frozen.
    """
    gc.collect()
    if _are_frozen:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage a hundredth as often: a step of a large batch makes thousands of objects, none of them in cycles,
    and with torch and transformers imported a full collection takes as long as many steps.

    The threshold is the process's: with several engines in threads the first one raises it, and the last restores it.
    """
    global _thresholds, _num_rare
    with _threshold_lock:
        if not _num_rare:
            _thresholds = gc.get_threshold()
            gc.set_threshold(min(100 * _thresholds[0], _LARGEST_THRESHOLD), *_thresholds[1:])
        _num_rare += 1
    try:
        yield
    finally:
        with _threshold_lock:
            _num_rare -= 1
            if not _num_rare:
                gc.set_threshold(*_thresholds)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
