"""What a benchmark reports about speculative decoding: acceptance, tokens per step, the speed-up against no drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiakq.bench.summary import rate


def draft_metrics(
    num_drafts: float = 0,
    num_draft_tokens: float = 0,
    num_accepted_tokens: float = 0,
    by_position: Sequence[float] = (),
    num_tokens: float = 0,
    num_steps: float = 0,
) -> dict[str, Any]:
    """The metrics; None where there were no draft tokens.

    num_drafts   verifications of one sequence's draft tokens.
    by_position  accepted tokens of the first, second, ... position.
    num_tokens, num_steps  generated tokens, and the engine's steps in which they were; 0: not known.
    """
    return {
        "num_drafts": num_drafts,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "acceptance_rate": num_accepted_tokens / num_draft_tokens if num_draft_tokens else None,
        "acceptance_by_position": [count / num_drafts for count in by_position] if num_drafts else [],
        "acceptance_length": 1 + num_accepted_tokens / num_drafts if num_drafts else None,
        "tokens_per_step": num_tokens / num_steps if num_steps else None,
        "output_throughput_without": None,
        "speedup": None,
    }


def add_speedup(metrics: dict[str, Any], with_drafts: float, without: float, num_tokens: int) -> None:
    """Fill in what runs of the same requests took, in seconds, with draft tokens and without."""
    metrics["output_throughput_without"] = rate(num_tokens, without)
    metrics["speedup"] = without / with_drafts if with_drafts else None
