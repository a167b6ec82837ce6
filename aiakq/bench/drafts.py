"""What a benchmark reports about speculative decoding: acceptance, tokens per step, the speed-up against no drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from aiakq.bench.comparison.statistics import paired_ratio
from aiakq.bench.summary import rate


def draft_metrics(
    num_drafts: float = 0,
    num_draft_tokens: float = 0,
    num_accepted_tokens: float = 0,
    by_position: Sequence[float] = (),
    num_tokens: float = 0,
    num_steps: float = 0,
) -> dict[str, object]:
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
        "speedup_interval": {"low": None, "high": None},
        "speedups": [],
    }


def add_speedup(
    metrics: dict[str, object], with_drafts: Sequence[float], without: Sequence[float], num_tokens: float
) -> None:
    """Fill in what rounds of the same requests took, in seconds, with draft tokens and without.

    ``speedup`` is the median of the rounds, ``speedup_interval`` the 95 % confidence interval of their geometric mean.

    num_tokens  generated tokens of a round.
    """
    ratios = [plain / drafting for drafting, plain in zip(with_drafts, without, strict=True)]
    interval = paired_ratio([math.log(ratio) for ratio in ratios])
    metrics["output_throughput_without"] = rate(num_tokens, median(without))
    metrics["speedup"] = median(ratios)
    metrics["speedup_interval"] = {"low": interval.low, "high": interval.high}
    metrics["speedups"] = ratios


def order(number: int) -> tuple[bool, bool]:
    """Whether the first and the second run of a round have draft tokens: alternating, so that drift cancels out."""
    return (True, False) if number % 2 == 0 else (False, True)
