"""Builds an engine from a configuration: loads the model and sizes the page pool, with every phase timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from aiakq.runtime.build.features import new_scheduler
from aiakq.runtime.build.limits import bounds_of, limits_of
from aiakq.runtime.build.new_runner import fitting_pages, load_models, new_model_proposer, new_target_runner
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.device_memory import release_memory
from aiakq.runtime.distributed.starting import limit_torch_threads, start_ranks
from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.executor.kv_cache import describe_states, fit_positions, kv_bytes_per_page
from aiakq.runtime.executor.selection import new_executor
from aiakq.system.memory import gc_frozen

if TYPE_CHECKING:
    from aiakq.runtime.distributed.rank_group import RankGroup


@dataclass(frozen=True)
class Phase:
    """A finished phase of the start-up: its name, its seconds, and a detail."""

    name: str
    seconds: float
    detail: str


def _ignore(phase: Phase) -> None:
    """Ignore a phase; the default of ``on_phase``."""


def load_engine(config: EngineConfig, on_phase: Callable[[Phase], None] = _ignore) -> Engine:
    """Load the model, size the page pool and build the engine, reporting each phase.

    Raises what ``load_within_memory`` raises.
    """
    limit_torch_threads()
    config = fit_positions(config)
    if config.draft is not None:
        config = replace(config, draft=fit_positions(config.draft))
    group = start_ranks(config)
    try:
        return _load_engine(config, on_phase, group)
    except BaseException:
        if group is not None:
            group.close()
        raise


def _load_engine(config: EngineConfig, on_phase: Callable[[Phase], None], group: RankGroup | None) -> Engine:
    started = time.monotonic()
    with gc_frozen():
        model, operations, draft = load_models(config, *((group.share, group.host_ranks) if group else (None, 1)))
    release_memory()
    method = f"{config.spec.method}, {config.spec.describe()}" if config.spec else "not quantized"
    method += " rounded at load" if config.load.rounds else ""
    on_phase(Phase("weights", time.monotonic() - started, f"{config.architecture}, {method}"))
    started = time.monotonic()
    if group is None:
        num_pages = fitting_pages(config, model, draft)
    else:
        group.wait_loaded(config, operations.get("tensor parallel", ""))  # only then is free memory known
        num_pages = group.count_pages(fitting_pages(config, model, draft, group.host_ranks))
    if config.fit_model_len:
        fitting = min(config.model.num_positions, (num_pages - 1) * config.cache.block_size)
        config = replace(config, max_model_len=min(config.max_model_len, fitting))
    pool = PagePool(num_pages, config.cache.block_size, config.cache.enable_prefix_caching)
    tokens = pool.num_usable * config.cache.block_size
    bounds = bounds_of(config, tokens)
    num_slots = config.scheduler.max_num_seqs + 1  # one slot is the engine's
    runner = new_target_runner(config, model, num_pages, num_slots, samples=True)
    how = runner.capture(bounds, config.compilation)
    scheduler = new_scheduler(config.scheduler, pool)
    size = num_pages * kv_bytes_per_page(model, config.cache)
    pages = f"{pool.num_usable} of {config.cache.block_size} tokens = {tokens} tokens, {size / 2**20:.0f} MiB"
    on_phase(Phase("KV pages", time.monotonic() - started, pages))
    limits = limits_of(config, model, tokens)
    dtype = str(config.device.dtype).removeprefix("torch.")
    facts = {
        "model": f"{config.architecture}, {method}",
        "device": device_name(config.device.device),
        "dtype": f"{dtype} ({config.device.dtype_reason})",
        **operations,
        "step": how + ("; the next is prepared meanwhile" if config.scheduler.async_scheduling else ""),
        "KV pages": f"{pages}, {str(config.cache.dtype).removeprefix('torch.')}",
        "batch": f"up to {config.scheduler.max_num_seqs} sequences, {bounds.tokens} tokens a step",
    }
    ranks = [] if group is None else [group.describe()]
    ranks += [remark] if (remark := config.parallel.remark(config.model.raw)) else []
    if config.generation.remark and limits.generates:
        facts["generation_config.json"] = config.generation.remark
    if limits.pooling is not None:
        facts["task"] = limits.pooling.describe()
    if ranks:
        facts["ranks"] = "; ".join(ranks)
    if config.scheduler.lora is not None:
        facts["LoRA adapters"] = config.scheduler.lora.describe()
    if runner.states is not None:
        facts["recurrent states"] = describe_states(config, model)
    if group is not None:
        _configure(
            group, (num_pages, num_slots, bounds.tokens, bounds.rows, bounds.length), runner.captured is not None
        )
    proposer = None
    if draft is not None:
        proposer, facts["drafts"] = new_model_proposer(config, draft, model, num_pages, num_slots, bounds)
    executor = new_executor(runner, group, num_slots, -(-bounds.length // config.cache.block_size), proposer)
    ahead = max(config.parallel.pipeline_parallel_size, 1 + config.scheduler.async_scheduling)
    return _with_step_costs(config, Engine(executor, scheduler, limits, facts, ahead))


def _configure(group: RankGroup, sizes: tuple[int, int, int, int, int], is_captured: bool) -> None:
    """Let the ranks of ``group`` allocate what this process has; ``sizes`` are the fields of ``Configure``."""
    from aiakq.runtime.distributed.messages import Configure

    group.configure(Configure(*sizes), is_captured)


def _with_step_costs(config: EngineConfig, engine: Engine) -> Engine:
    """Return the engine after ``set_step_costs``."""
    if config.scheduler.speculation is not None:
        from aiakq.runtime.speculation.step_costs import set_step_costs

        set_step_costs(config, engine.scheduler, engine.executor, engine.limits, engine.facts)
    return engine


def device_name(device: torch.device) -> str:
    """Return a description of the device, with the number of threads for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"
