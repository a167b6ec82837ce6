"""The configuration of a scheduler that is tested without an engine."""

from __future__ import annotations

from typing import Any

from aiakq.runtime.config.scheduler import SchedulerConfig


def scheduler_config(**fields: Any) -> SchedulerConfig:
    """A configuration with chunked prefill; ``fields`` replace the values here."""
    values: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enable_chunked_prefill": True,
        "max_num_partial_prefills": 1,
        "max_long_partial_prefills": 1,
        "long_prefill_token_threshold": 0,
        "scheduler_delay_factor": 0.0,
    }
    return SchedulerConfig(**{**values, **fields})
