"""The models of an engine, and their runners: that of the target model is the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiakq.runtime.build.features import new_parts
from aiakq.runtime.build.model_loader import load_within_memory
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.model_share import ModelShare
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.kv_cache import count_pages, kv_bytes_per_page, state_bytes, state_rows
from aiakq.runtime.executor.model_proposer import ModelProposer
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sequences import ExecutorPart
from aiakq.runtime.models.interface import Model
from aiakq.runtime.multimodal.parts import reserved_bytes as encoder_reserved_bytes
from aiakq.runtime.speech.parts import reserved_bytes as speech_reserved_bytes


def new_runner(
    config: EngineConfig, model: Model, num_pages: int, num_slots: int, parts: Sequence[ExecutorPart] = ()
) -> Runner:
    """Create a runner of ``model`` with a KV cache of ``num_pages`` and the ``parts`` of features."""
    states = state_rows(config, model, num_pages, num_slots)
    return Runner(model, num_pages, config.cache.block_size, config.device.device, states, parts)


def new_target_runner(config: EngineConfig, model: Model, num_pages: int, num_slots: int, samples: bool) -> Runner:
    """Create the runner of the target model, with the parts of features. Raises what ``new_parts`` raises.

    samples  whether tokens are sampled in this process.
    """
    return new_runner(config, model, num_pages, num_slots, new_parts(config, model, samples))


def fitting_pages(config: EngineConfig, model: Model, draft: Model | None = None, host_ranks: int = 1) -> int:
    """Return how many pages fit into memory beside what features take; see ``count_pages``.

    draft  model that proposes draft tokens, with pages of its own.
    """
    draft_bytes = 0 if draft is None else kv_bytes_per_page(draft, config.cache)
    reserved_bytes = 0 if draft is None else state_bytes(draft, config.scheduler)
    if model.adapters is not None:
        reserved_bytes += model.adapters.reserved_bytes(config.device.device, config.scheduler.num_stages)
    reserved_bytes += encoder_reserved_bytes(config, model) + speech_reserved_bytes(config, model)
    return count_pages(config, model, host_ranks, draft_bytes, reserved_bytes)


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
    if draft.model.short_context != config.model.short_context:
        runner.short_start = 0  # what is short for the target may be too long for the draft model
    proposer: ModelProposer = speculation.load_method().new_proposer(config, runner, target, bounds)
    how = runner.capture(replace(bounds, length=min(bounds.length, draft.model.num_positions)), draft.compilation)
    quantization = f"{draft.spec.method}, {draft.spec.describe()}" if draft.spec else "not quantized"
    return proposer, f"{speculation.method}, {draft.architecture}, {quantization}; {how}"
