"""CacheConfig: size and storage of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aiakq.arguments.argument import part_of
from aiakq.arguments.engine import CacheArguments, EngineArguments
from aiakq.runtime.config.device import DeviceConfig, pick_kv_dtype


@dataclass(frozen=True, kw_only=True)
class CacheConfig(CacheArguments):
    """Arguments of the KV cache, and the ``dtype`` of keys and values that ``kv_cache_dtype`` resolves to."""

    block_size: int
    dtype: torch.dtype

    @staticmethod
    def from_args(args: EngineArguments, device: DeviceConfig, is_recurrent: bool) -> CacheConfig:
        """is_recurrent: whether the model has recurrent layers, whose states are as large as the keys and values of
        many tokens. Raises ``bad_option`` for a dtype that the GPU does not support.
        """
        settled = {
            "block_size": args.block_size or (256 if is_recurrent else 16),
            "dtype": pick_kv_dtype(args.kv_cache_dtype, device.dtype, device.device),
        }
        return CacheConfig(**part_of(CacheConfig, args) | settled)
