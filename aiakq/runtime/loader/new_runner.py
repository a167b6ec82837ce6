"""new_runner: creates the runner of a loaded model on any rank."""

from __future__ import annotations

from dataclasses import replace

from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.draft_model import DraftModel
from aiakq.runtime.executor.kv_cache import state_rows
from aiakq.runtime.executor.projection import Projection
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.lora.store import AdapterStore
from aiakq.runtime.models.decoder import Decoder, Model


def new_runner(config: EngineConfig, model: Model, num_pages: int, num_slots: int) -> Runner:
    """Create a runner of ``model`` with a KV cache of ``num_pages``. Raises what ``Projection.load`` raises."""
    states = state_rows(config, model, num_pages, num_slots)
    projection = None if config.pooling is None else Projection.load(config.load.path, config.pooling.dense)
    runner = Runner(model, num_pages, config.cache.block_size, config.device.device, states, projection)
    if isinstance(model, Decoder) and model.adapters is not None:
        runner.adapters = AdapterStore(model.adapters, config.device.device)
    return runner


def new_draft(
    config: EngineConfig, model: Model, num_pages: int, num_slots: int, bounds: Bounds
) -> tuple[DraftModel, str]:
    """Create the proposer of draft tokens that runs ``model``; return it and a line for the start-up table."""
    runner = new_runner(config, model, num_pages, num_slots)
    length = min(bounds.length, config.model.num_positions)
    how = runner.capture(replace(bounds, length=length), config.compilation)
    method = f"{config.spec.method}, {config.spec.describe()}" if config.spec else "not quantized"
    return DraftModel(runner, bounds.tokens, length), f"{config.architecture}, {method}; {how}"
