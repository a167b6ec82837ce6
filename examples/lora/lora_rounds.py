"""Alternate decoding with and without adapters, for lora_cost.py and lora_cost_vllm.py, whose engines share an API."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any


def sampling(tokens: int) -> dict[str, Any]:
    """The sampling parameters of every request."""
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}


def decoding_speed(llm: Any, params: Any, adapters: Sequence[Any], num_requests: int) -> float:
    """Return the tokens per second of requests that use the adapters in turn."""
    prompts = [{"prompt_token_ids": [5 + number % 50] * 8} for number in range(num_requests)]
    chosen = [adapters[number % len(adapters)] for number in range(num_requests)] if adapters else None
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
    return num_requests * params.max_tokens / (time.perf_counter() - started)


def compare(
    base: Any, lora: Any, params: Any, adapters: Sequence[Any], counts: Sequence[int], batch: int, rounds: int
) -> dict[str, Any]:
    """Measure ``lora`` with the first ``counts`` of ``adapters``, each time next to ``base``, an engine without LoRA.

    Returns medians of tokens per second, and of their ratios, which are also returned one by one.
    """
    speeds: dict[str, list[float]] = {"base": [], **{str(count): [] for count in counts}}
    ratios: dict[str, list[float]] = {str(count): [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            num_requests = max(batch, count)
            before = decoding_speed(base, params, [], num_requests)
            found = decoding_speed(lora, params, adapters[:count], num_requests)
            print(f"{count} adapters: {found:.1f} tokens/s, without LoRA {before:.1f}", file=sys.stderr, flush=True)
            speeds["base"].append(before)
            speeds[str(count)].append(found)
            ratios[str(count)].append(found / before)
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "ratios": ratios,
    }
