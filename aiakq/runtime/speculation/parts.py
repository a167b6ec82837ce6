"""What speculative decoding adds to an engine. Its modules are imported only if it is enabled."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiakq.runtime.config.scheduler import SchedulerConfig
    from aiakq.runtime.engine.pages import PagePool
    from aiakq.runtime.speculation.planner import DraftPlanner


def new_planner(config: SchedulerConfig, pool: PagePool) -> DraftPlanner | None:
    """Return the planner of a scheduler over ``pool``; None without speculative decoding."""
    if config.speculation is None:
        return None
    from aiakq.runtime.speculation.planner import DraftPlanner

    return DraftPlanner(pool, config, config.speculation)
