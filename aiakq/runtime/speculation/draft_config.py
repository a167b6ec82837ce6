"""The configuration of a model that proposes draft tokens, as a part of that of the target model."""

from __future__ import annotations

from dataclasses import replace

from aiakq.arguments.engine import EngineArguments
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.load import LoadConfig


def draft_folder(args: EngineArguments) -> LoadConfig:
    """Where the model of ``args`` is, after downloads. Raises model_* and ``path_outside_model``."""
    return LoadConfig.from_args(args)


def with_draft(config: EngineConfig, draft: EngineConfig, method: str) -> EngineConfig:
    """``config`` with the model of ``draft``, which proposes up to its own context."""
    speculation = config.scheduler.speculation
    assert speculation is not None
    length = min(speculation.max_model_len, draft.max_model_len)
    speculation = replace(speculation, method=method, max_model_len=length)
    scheduler = replace(config.scheduler, speculation=speculation)
    length = min(config.max_model_len, draft.max_model_len)
    return replace(config, scheduler=scheduler, draft=replace(draft, max_model_len=length, scheduler=scheduler))
