"""Starts the ranks that a configuration asks for."""

from __future__ import annotations

from aiakq.errors import error
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.child_ranks import start_child_ranks
from aiakq.runtime.distributed.rank_group import RankGroup


def start_ranks(config: EngineConfig) -> RankGroup | None:
    """The other ranks of ``config``, loading; None if there are none. Raises ``ranks_unavailable``, ``rank_failed``."""
    if config.parallel.world_size == 1:
        return None
    if config.device.device.type != "cpu":
        raise error("ranks_unavailable", reason="they share the memory of a CPU, and the device is a GPU")
    return start_child_ranks(config.parallel)
