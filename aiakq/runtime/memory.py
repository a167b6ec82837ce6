"""Memory: how much there is, and how many KV pages fit into it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from aiakq.errors import error
from aiakq.kernels.types import LARGEST
from aiakq.runtime.config import EngineConfig
from aiakq.runtime.models.decoder import Model


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: of the GPU, or of RAM within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0] != "max":
        available = min(available, int(limit[0]) - int(used[0]))
    return max(available, 0)


def is_out_of_memory(failure: Exception) -> bool:
    """Whether an allocation failed. Torch's allocator of host memory and cuBLAS have no exceptions of their own."""
    if isinstance(failure, (MemoryError, torch.OutOfMemoryError)):
        return True
    told = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(failure, RuntimeError) and any(words in str(failure) for words in told)


def give_back() -> None:
    """Return memory that nothing uses any more to the system.

    Objects that hold each other wait for the collector, and glibc keeps freed pieces of some megabytes in its heap,
    which grows by them when sizes vary.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def few_objects() -> Iterator[None]:
    """Let ``give_back`` look only at what is made inside: what imports have made takes it a third of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def kv_bytes_per_page(model: Model, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one page, over all layers, and of their scales if they are of 8 bits."""
    layers, kv_heads, head_dim = model.kv_shape
    per_head = head_dim * dtype.itemsize + (4 if dtype in LARGEST else 0)
    return 2 * layers * page_size * kv_heads * per_head


def count_pages(config: EngineConfig, model: Model) -> int:
    """Pages for as many full-length sequences as may run, within the memory that is left; scratch page included.

    Raises ``no_memory`` when not even one sequence of max_model_len tokens fits; of one page, if that may be lowered.
    """
    if config.num_pages is not None:
        return config.num_pages
    per_sequence = -(-config.max_model_len // config.page_size)
    wanted = config.max_num_seqs * per_sequence + 1
    page_bytes = kv_bytes_per_page(model, config.page_size, config.kv_dtype)
    free = free_memory(config.device)
    # The weights are loaded already: the fraction applies to what is left, less room for one step's activations.
    activations = config.max_num_batched_tokens * config.hf.intermediate_size * 16 + config.max_num_seqs * (
        config.hf.vocab_size * 16
    )
    fitting = int((free * config.memory_fraction - activations) // page_bytes)
    if fitting < (1 if config.fit_model_len else per_sequence) + 1:
        raise error(
            "no_memory",
            available=f"{free / 2**30:.1f} GiB",
            needed=f"{(per_sequence + 1) * page_bytes / 2**30:.1f} GiB",
            max_model_len=config.max_model_len,
            fits=max(0, (fitting - 1) * config.page_size),
        )
    return min(wanted, fitting)
