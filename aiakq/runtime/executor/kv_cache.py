"""The KV cache: bytes of a page, and how many pages fit into memory."""

from __future__ import annotations

from dataclasses import replace

from aiakq.errors import error
from aiakq.runtime.config.cache import CacheConfig
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.device_memory import free_memory
from aiakq.runtime.executor.states import RING, StateRows
from aiakq.runtime.models.decoder import Decoder, Model


def kv_bytes_per_page(model: Model, cache: CacheConfig) -> int:
    """Bytes of keys and values of one page, over all layers, and of their scales if they are of 8 bits; and of the
    states of recurrent layers at its end, from which later prompts may start.
    """
    return cache.block_size * model.kv_bytes_per_token(cache.dtype) + cache.enable_prefix_caching * model.state_bytes()


def state_bytes(model: Model, max_num_seqs: int) -> int:
    """Bytes of the states of running sequences, of the engine's own one, and of the one of zeros."""
    return (1 + RING * (max_num_seqs + 1)) * model.state_bytes()


def state_rows(config: EngineConfig, model: Model, num_pages: int, num_slots: int) -> StateRows | None:
    """The rows of the states of a model with recurrent layers; None for any other."""
    if not model.state_bytes():
        return None
    return StateRows(num_pages, config.cache.block_size, num_slots, config.cache.enable_prefix_caching)


def describe_states(config: EngineConfig, model: Model) -> str:
    """The states of recurrent layers, for the start-up table."""
    size = state_bytes(model, config.scheduler.max_num_seqs) / 2**20
    kept = "one at the end of every page, " if config.cache.enable_prefix_caching else ""
    return f"{model.state_bytes() / 2**20:.1f} MiB each: {kept}{RING} of every sequence that may run = {size:.0f} MiB"


def adapter_bytes(config: EngineConfig, model: Model) -> int:
    """Bytes that LoRA adapters may take."""
    lora = config.scheduler.lora
    if lora is None:
        return 0
    if lora.max_bytes is not None:
        return lora.max_bytes
    assert isinstance(model, Decoder) and model.adapters is not None, "only native models have adapters"
    return lora.max_resident * model.adapters.largest_bytes


def fit_positions(config: EngineConfig) -> EngineConfig:
    """``config`` with tables for no more positions than can be served: a config.json may claim any number.

    Raises ``no_memory`` where the tables alone would take what is free, unless max_model_len may be lowered.
    """
    cache, model, positions = config.cache, config.model, config.max_model_len
    if cache.num_gpu_blocks_override is not None:
        positions = min(positions, (cache.num_gpu_blocks_override - 1) * cache.block_size)
    free = free_memory(config.device.device) * cache.gpu_memory_utilization
    # Cosines and sines of half a head; the keys and values of a position are many times as large.
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


def count_pages(config: EngineConfig, model: Model, host_ranks: int = 1, draft_bytes: int = 0) -> int:
    """Pages for as many full-length sequences as may run, within the memory that is left; scratch page included.

    host_ranks   processes that share this memory, each with an equal part.
    draft_bytes  of a page of the draft model.
    Raises ``no_memory`` when not even one sequence of max_model_len tokens fits; of one page, if that may be lowered.
    """
    cache, scheduler = config.cache, config.scheduler
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    per_sequence = -(-config.max_model_len // cache.block_size)
    most = scheduler.max_num_seqs * per_sequence + 1
    page_bytes = kv_bytes_per_page(model, cache) + draft_bytes
    states = state_bytes(model, scheduler.max_num_seqs)
    free = free_memory(config.device.device) // host_ranks
    # The weights are loaded already: the fraction applies to what is left, less room for one step's activations.
    activations = scheduler.max_num_batched_tokens * config.model.intermediate_size * 16 + scheduler.max_num_seqs * (
        config.model.vocab_size * 16
    )
    rest = free * cache.gpu_memory_utilization - activations - states - adapter_bytes(config, model)
    fitting = int(rest // page_bytes) if page_bytes else most if rest >= 0 else 0
    if fitting < (1 if config.fit_model_len else per_sequence) + 1:
        raise error(
            "no_memory",
            available=f"{free / 2**30:.1f} GiB",
            needed=f"{((per_sequence + 1) * page_bytes + states) / 2**30:.1f} GiB",
            max_model_len=config.max_model_len,
            fits=max(0, (fitting - 1) * cache.block_size),
            also=f", or --max-num-seqs, whose states take {states / 2**30:.1f} GiB," if states else "",
        )
    return min(most, fitting)
