"""Device memory: free bytes, detection of out-of-memory errors, release of cached memory."""

from __future__ import annotations

import torch

from aiakq.errors import memory_error
from aiakq.system.memory import free_host_memory, release_host_memory


def free_memory(device: torch.device) -> int:
    """Return the free bytes of the GPU, or of RAM within the container's limit."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def is_out_of_memory(failure: Exception) -> bool:
    """Whether an exception is a failed allocation; torch's CPU allocator and cuBLAS raise generic exceptions."""
    return memory_error(failure) is not None


def release_memory() -> None:
    """Return unused memory to the system and to the GPU."""
    release_host_memory()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
