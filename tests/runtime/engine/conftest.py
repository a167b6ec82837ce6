"""Engine arguments with which the same requests must have the same outputs."""

from __future__ import annotations

from typing import Any

import pytest

#: Few pages force preemption; small pages make prompts with shared prefixes hit the prefix cache.
ENGINE_MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "one_at_a_time": {"max_num_seqs": 1},
    "chunked": {"max_num_batched_tokens": 13},
    "not_chunked": {"enable_chunked_prefill": False},
    "preempted": {"num_gpu_blocks_override": 40, "block_size": 4},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "small_pages": {"block_size": 1},
    "odd_pages": {"block_size": 7, "max_num_batched_tokens": 50},
    "by_priority": {"scheduling_policy": "priority", "max_num_seqs": 5, "max_num_batched_tokens": 30},
}


@pytest.fixture(scope="session")
def engine_modes() -> dict[str, dict[str, Any]]:
    """Arguments of ``LLM`` by the name of the mode."""
    return ENGINE_MODES


@pytest.fixture(params=ENGINE_MODES)
def engine_mode(request: pytest.FixtureRequest) -> str:
    """The name of each mode in turn."""
    return request.param
