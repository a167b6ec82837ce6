"""CacheConfig: size and storage of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Pages of the KV cache, named as the arguments.

    dtype                    of keys and values, which ``kv_cache_dtype`` names.
    num_gpu_blocks_override  exact number of pages; None: as many as are useful and fit.
    """

    dtype: torch.dtype
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
