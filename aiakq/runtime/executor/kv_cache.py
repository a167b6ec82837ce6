"""Size of the KV cache: bytes per page, and the number of pages that fit into memory."""

from __future__ import annotations

from dataclasses import replace

from aiakq.errors import error
from aiakq.runtime.config.cache import CacheConfig
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.device_memory import free_memory
from aiakq.runtime.executor.states import StateRows, states_per_sequence
from aiakq.runtime.models.interface import Model


def kv_bytes_per_page(model: Model, cache: CacheConfig) -> int:
    """Return the bytes of one page over all layers.

    They include the scales of 8-bit keys and values and, with prefix caching, the states of recurrent layers at the end
    of the page.
    """
    return cache.block_size * model.kv_bytes_per_token(cache.dtype) + cache.enable_prefix_caching * model.state_bytes()


def state_bytes(model: Model, scheduler: SchedulerConfig) -> int:
    """Return the bytes of the states of running sequences, of the engine's internal sequence, and of the zero state."""
    per_sequence = states_per_sequence(scheduler.num_drafts)
    return (1 + per_sequence * (scheduler.max_num_seqs + 1)) * model.state_bytes()


def state_rows(config: EngineConfig, model: Model, num_pages: int, num_slots: int) -> StateRows | None:
    """Return the allocation of state rows for a model with recurrent layers; None for other models."""
    if not model.state_bytes():
        return None
    cache = config.cache
    return StateRows(num_pages, cache.block_size, num_slots, cache.enable_prefix_caching, config.scheduler.num_drafts)


def describe_states(config: EngineConfig, model: Model) -> str:
    """Return a description of the states of recurrent layers for the start-up table."""
    size = state_bytes(model, config.scheduler) / 2**20
    kept = "one at the end of every page, " if config.cache.enable_prefix_caching else ""
    count = states_per_sequence(config.scheduler.num_drafts)
    return f"{model.state_bytes() / 2**20:.1f} MiB each: {kept}{count} per running sequence = {size:.0f} MiB"


def fit_positions(config: EngineConfig) -> EngineConfig:
    """Return ``config`` with ``num_positions`` limited to what can be served, since config.json may claim any number.

    Raises ``no_memory`` if the rotary tables alone exceed the free memory, unless max_model_len may be reduced.
    """
    cache, model, positions = config.cache, config.model, config.max_model_len
    if cache.num_gpu_blocks_override is not None:
        positions = min(positions, (cache.num_gpu_blocks_override - 1) * cache.block_size)
    free = free_memory(config.device.device) * cache.gpu_memory_utilization
    # Cosine and sine for half the head size; the keys and values of a position are many times as large.
    row_bytes = 4 * model.head_dim
    if config.fit_model_len:
        positions = min(positions, int(free / 8 // row_bytes))
    elif positions * row_bytes > free:
        raise error(
            "no_memory",
            available=f"{free / 2**30:.1f} GiB",
            needed=f"more than {positions * row_bytes / 2**30:.1f} GiB",
            max_model_len=config.max_model_len,
            fits=int(free / 8 // row_bytes),
            also="",
        )
    return replace(config, model=replace(model, num_positions=max(1, positions)))


def _checked_bytes(given: int, free: int) -> int:
    """Return the size of --kv-cache-memory-bytes. Raises ``bad_option`` if it exceeds the free memory."""
    if given > free:
        expected = f"at most {free}, the free memory after the weights are loaded"
        raise error("bad_option", option="--kv-cache-memory-bytes", value=given, expected=expected, hint="")
    return given


def memory_for_pages(config: EngineConfig, model: Model, free: int) -> float:
    """Return the bytes for pages if ``free`` bytes are left beside the weights; negative if there is no room for less.

    The fraction of --gpu-memory-utilization applies to what the weights leave, less the activations of one step, those
    of all of a token's experts among them, and the states of recurrent layers.
    """
    scheduler = config.scheduler
    row = max(config.model.intermediate_size * 16, model.mixture_elements() * config.device.dtype.itemsize)
    activations = scheduler.max_num_batched_tokens * row + scheduler.max_num_seqs * config.model.vocab_size * 16
    return free * config.cache.gpu_memory_utilization - activations - state_bytes(model, scheduler)


def count_pages(
    config: EngineConfig, model: Model, host_ranks: int = 1, draft_bytes: int = 0, reserved_bytes: int = 0
) -> int:
    """Return the number of pages for max_num_seqs sequences of full length, or fewer if memory is short.

    The scratch page is included.

    host_ranks      number of processes that share this memory equally.
    draft_bytes     bytes of one page of the draft model.
    reserved_bytes  memory that features take besides.

    Raises ``no_memory`` if not even one sequence of max_model_len tokens fits (or of one page, if max_model_len may be
    reduced).
    """
    cache, scheduler = config.cache, config.scheduler
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    per_sequence = -(-config.max_model_len // cache.block_size)
    max_pages = scheduler.max_num_seqs * per_sequence + 1
    page_bytes = kv_bytes_per_page(model, cache) + draft_bytes
    states = state_bytes(model, scheduler)
    free = free_memory(config.device.device) // host_ranks
    remaining = memory_for_pages(config, model, free) - reserved_bytes
    if cache.kv_cache_memory_bytes is not None:
        remaining = _checked_bytes(cache.kv_cache_memory_bytes, free)
    fitting = int(remaining // page_bytes) if page_bytes else max_pages if remaining >= 0 else 0
    if fitting < (1 if config.fit_model_len else per_sequence) + 1:
        raise error(
            "no_memory",
            available=f"{free / 2**30:.1f} GiB",
            needed=f"{((per_sequence + 1) * page_bytes + states) / 2**30:.1f} GiB",
            max_model_len=config.max_model_len,
            fits=max(0, (fitting - 1) * cache.block_size),
            also=f", or --max-num-seqs, whose states take {states / 2**30:.1f} GiB," if states else "",
        )
    return min(max_pages, fitting)
