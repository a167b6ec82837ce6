"""SchedulerConfig: how many sequences and tokens share a step. Standard library only: the scheduler knows no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of the scheduler, named as the arguments.

    long_prompt_tokens  a prompt with more uncomputed tokens is long; 0: none is. The same as
                        ``long_prefill_token_threshold``, or a share of the context where several prompts run together.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    long_prompt_tokens: int = 0
    scheduling_policy: str = "fcfs"
    scheduler_delay_factor: float = 0.0
    async_scheduling: bool = False
