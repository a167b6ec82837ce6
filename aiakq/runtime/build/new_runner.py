"""The models of an engine, and their runners: that of the target model is the same on every rank."""

from __future__ import annotations

from dataclasses import replace

from aiakq.runtime.build.model_loader import load_within_memory
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.model_share import ModelShare
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.kv_cache import state_rows
from aiakq.runtime.executor.model_proposer import ModelProposer
from aiakq.runtime.executor.projection import Projection
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.lora.store import AdapterStore
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import Model


def new_runner(config: EngineConfig, model: Model, num_pages: int, num_slots: int) -> Runner:
    """Create a runner of ``model`` with a KV cache of ``num_pages``. Raises what ``Projection.load`` raises."""
    states = state_rows(config, model, num_pages, num_slots)
    projection = None if config.pooling is None else Projection.load(config.load.path, config.pooling.dense)
    runner = Runner(model, num_pages, config.cache.block_size, config.device.device, states, projection)
    if isinstance(model, Decoder) and model.adapters is not None:
        runner.adapters = AdapterStore(model.adapters)
    return runner


def load_models(
    config: EngineConfig, share: ModelShare | None, host_ranks: int
) -> tuple[Model, dict[str, str], Model | None]:
    """The model of ``config``, rows of the start-up table about it, and the model that proposes draft tokens for it, if
    there is one. Raises what ``load_within_memory`` and the method of speculative decoding raise.

    host_ranks  ranks that share the memory of this machine.
    """
    target, operations = load_within_memory(config, share, host_ranks)
    speculation = config.scheduler.speculation
    draft: Model | None = None
    if config.draft is not None and speculation is not None:
        draft = speculation.load_method().load(config, target, lambda one: load_within_memory(one)[0])
    return target, operations, draft


def new_model_proposer(
    config: EngineConfig, model: Model, target: Model, num_pages: int, num_slots: int, bounds: Bounds
) -> tuple[ModelProposer, str]:
    """The proposer that runs ``model``, and a line about it for the start-up table."""
    draft, speculation = config.draft, config.scheduler.speculation
    assert draft is not None and speculation is not None
    runner = new_runner(draft, model, num_pages, num_slots)
    proposer: ModelProposer = speculation.load_method().new_proposer(config, runner, target, bounds)
    how = runner.capture(replace(bounds, length=min(bounds.length, draft.model.num_positions)), draft.compilation)
    quantization = f"{draft.spec.method}, {draft.spec.describe()}" if draft.spec else "not quantized"
    return proposer, f"{speculation.method}, {draft.architecture}, {quantization}; {how}"
