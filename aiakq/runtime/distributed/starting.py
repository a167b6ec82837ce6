"""Starts the ranks that a configuration asks for."""

from __future__ import annotations

import os

import torch

from aiakq.errors import error
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.child_ranks import start_child_ranks
from aiakq.runtime.distributed.rank_group import RankGroup
from aiakq.system.threads import threads_in_limit


def limit_torch_threads() -> None:
    """Keep torch's threads within the limit of processor time, for programs that have imported torch themselves."""
    limit = threads_in_limit()
    if limit is not None and limit < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(limit)


def start_ranks(config: EngineConfig) -> RankGroup | None:
    """The other ranks of ``config``, loading; None if there are none.

    Raises ``ranks_unavailable``, ``rank_failed``, and what ``start_ray_ranks`` raises.
    """
    if config.parallel.world_size == 1:
        return None
    if config.parallel.by_ray:
        if config.device.device.type != "cpu":
            raise error("ranks_unavailable", reason="those that Ray places compute on CPUs, and the device is a GPU")
        from aiakq.runtime.distributed.ray_ranks import start_ray_ranks

        return start_ray_ranks(config)
    gpus = gpus_of_ranks(config) if config.device.device.type == "cuda" else []
    return start_child_ranks(config.parallel, transport_of(config), gpus)


def transport_of(config: EngineConfig) -> str:
    """How the ranks of a stage meet; see collectives.py."""
    return "torch" if config.device.device.type == "cuda" else "memory"


def gpus_of_ranks(config: EngineConfig) -> list[int]:
    """The GPU of each rank, as this process counts them: one for each, the current one for rank 0.

    Raises ``ranks_unavailable``.
    """
    size, count = config.parallel.tensor_parallel_size, torch.cuda.device_count()
    if config.parallel.pipeline_parallel_size > 1:
        raise error("ranks_unavailable", reason="the stages of a pipeline are on CPUs, and the device is a GPU")
    if count < size:
        reason = f"{size} ranks need a GPU each, and {count} can be seen (CUDA_VISIBLE_DEVICES hides others)"
        raise error("ranks_unavailable", reason=reason)
    own = torch.cuda.current_device()
    return [own, *(gpu for gpu in range(count) if gpu != own)][:size]
