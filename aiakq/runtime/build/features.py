"""The features of an engine: each has a part in scheduling (``Resource`` or ``StepExtension``), in the executor
(``ExecutorPart``), or both.
"""

from __future__ import annotations

from collections.abc import Callable

from aiakq.registry import Registry
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.resources import Resource
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.executor.sequences import ExecutorPart
from aiakq.runtime.models.interface import Model

#: Feature -> a function that takes a ``SchedulerConfig`` and the ``PagePool``, and returns a ``Resource``, or None if
#: the configuration does not enable the feature.
RESOURCES: Registry[Callable[[SchedulerConfig, PagePool], Resource | None]] = Registry(
    "aiakq.resources",
    {
        "lora": "aiakq.runtime.lora.parts:new_resource",
        "multimodal": "aiakq.runtime.multimodal.parts:new_resource",
        "speculation": "aiakq.runtime.speculation.parts:new_planner",
    },
)
#: Feature -> a function that takes an ``EngineConfig``, the ``Model`` and whether tokens are sampled in its executor,
#: and returns an ``ExecutorPart``, or None if it has none there.
EXECUTOR_PARTS: Registry[Callable[[EngineConfig, Model, bool], ExecutorPart | None]] = Registry(
    "aiakq.executor_parts",
    {
        "lora": "aiakq.runtime.lora.parts:new_part",
        "multimodal": "aiakq.runtime.multimodal.parts:new_part",
        "pooling": "aiakq.runtime.pooling.parts:new_part",
        "speech": "aiakq.runtime.speech.parts:new_part",
        "structured": "aiakq.runtime.structured.executor_part:new_part",
    },
)


def new_scheduler(config: SchedulerConfig, pool: PagePool) -> Scheduler:
    """Create a scheduler over ``pool`` with the features that ``config`` enables. Raises ``plugin``."""
    found = [RESOURCES.load(name)(config, pool) for name in RESOURCES]
    return Scheduler(pool, config, [resource for resource in found if resource is not None])


def new_parts(config: EngineConfig, model: Model, samples: bool) -> list[ExecutorPart]:
    """Create the parts of features in the executor of one rank of ``model``. Raises ``plugin`` and what they raise.

    samples  whether tokens are sampled there.
    """
    found: list[ExecutorPart | None] = [EXECUTOR_PARTS.load(name)(config, model, samples) for name in EXECUTOR_PARTS]
    return [part for part in found if part is not None]
