"""What LoRA adds to an engine. Its modules are imported only if it is enabled."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.config.scheduler import SchedulerConfig
    from aiakq.runtime.engine.pages import PagePool
    from aiakq.runtime.lora.resource import AdapterResource
    from aiakq.runtime.lora.store import AdaptableModel, AdapterStore


def new_resource(config: SchedulerConfig, pool: PagePool) -> AdapterResource | None:
    """Return the resource of adapters; None if LoRA is disabled."""
    if config.lora is None:
        return None
    from aiakq.runtime.lora.resource import AdapterResource

    return AdapterResource(config.lora)


def new_part(config: EngineConfig, model: AdaptableModel, samples: bool) -> AdapterStore | None:
    """Return LoRA's part of an executor of ``model``; None if LoRA is disabled."""
    if model.adapters is None:
        return None
    from aiakq.runtime.lora.store import AdapterStore

    return AdapterStore(model.adapters)
