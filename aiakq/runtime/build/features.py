"""The features that have a part in scheduling: each is a ``Resource`` or a ``StepExtension`` of the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from aiakq.registry import Registry
from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.resources import Resource
from aiakq.runtime.engine.scheduler import Scheduler

#: Feature -> a function that takes a ``SchedulerConfig`` and the ``PagePool``, and returns a ``Resource``, or None if
#: the configuration does not enable the feature.
RESOURCES: Registry[Callable[[SchedulerConfig, PagePool], Resource | None]] = Registry(
    "aiakq.resources",
    {
        "lora": "aiakq.runtime.lora.resource:new_resource",
        "speculation": "aiakq.runtime.speculation.planner:new_planner",
    },
)


def new_scheduler(config: SchedulerConfig, pool: PagePool) -> Scheduler:
    """Create a scheduler over ``pool`` with the features that ``config`` enables. Raises ``plugin``."""
    found = [RESOURCES.load(name)(config, pool) for name in RESOURCES]
    return Scheduler(pool, config, [resource for resource in found if resource is not None])
