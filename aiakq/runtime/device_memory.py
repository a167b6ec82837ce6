"""Device memory: free bytes, detection of out-of-memory errors, release of cached memory."""

from __future__ import annotations

import torch

from aiakq.system.memory import free_host_memory, release_host_memory


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: of the GPU, or of RAM within the container's limit."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def is_out_of_memory(failure: Exception) -> bool:
    """Whether an allocation failed. Torch's allocator of host memory and cuBLAS have no exceptions of their own."""
    if isinstance(failure, (MemoryError, torch.OutOfMemoryError)):
        return True
    messages = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(failure, RuntimeError) and any(message in str(failure) for message in messages)


def release_memory() -> None:
    """Return memory that is no longer used to the system and to the GPU."""
    release_host_memory()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
