"""Starts the ranks that a configuration requires."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from aiakq.errors import error
from aiakq.runtime.config.engine import EngineConfig
from aiakq.system.threads import threads_in_limit

if TYPE_CHECKING:
    from aiakq.runtime.distributed.rank_group import RankGroup


def limit_torch_threads() -> None:
    """Reduce torch's threads to the cgroup's CPU limit, for programs that import torch before aiakq."""
    limit = threads_in_limit()
    if limit is not None and limit < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(limit)


def start_ranks(config: EngineConfig) -> RankGroup | None:
    """Start the other ranks of ``config``, which then load the model; return None if the world size is 1.

    Raises ``ranks_unavailable``, ``rank_failed``, and the errors of ``start_ray_ranks``.
    """
    if config.parallel.world_size == 1:
        return None
    if config.parallel.by_ray:
        if config.device.device.type != "cpu":
            raise error("ranks_unavailable", reason="ranks that Ray places compute on CPUs, but the device is a GPU")
        from aiakq.runtime.distributed.ray_ranks import start_ray_ranks

        return start_ray_ranks(config)
    from aiakq.runtime.distributed.child_ranks import start_child_ranks

    gpus = gpus_of_ranks(config) if config.device.device.type == "cuda" else []
    return start_child_ranks(config.parallel, transport_of(config), gpus)


def transport_of(config: EngineConfig) -> str:
    """Return the transport of the collectives of a stage; see collectives.py."""
    return "torch" if config.device.device.type == "cuda" else "memory"


def gpus_of_ranks(config: EngineConfig) -> list[int]:
    """Return the GPU index of each rank in this process's numbering; rank 0 has the current GPU.

    Raises ``ranks_unavailable``.
    """
    size, count = config.parallel.world_size, torch.cuda.device_count()
    if count < size:
        reason = f"{size} ranks need a GPU each, but {count} are visible (see CUDA_VISIBLE_DEVICES)"
        raise error("ranks_unavailable", reason=reason)
    current = torch.cuda.current_device()
    return [current, *(gpu for gpu in range(count) if gpu != current)][:size]
