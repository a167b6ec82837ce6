"""Metrics of served requests: throughput, latency distributions, goodput, and per-request timings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiakq.bench.client import Timing
from aiakq.bench.summary import milliseconds, rate

#: Durations that can have a goodput limit.
LIMITED = ("ttft", "tpot", "e2el")


def measure(
    timings: Sequence[Timing],
    duration: float,
    goodput: Mapping[str, float],
    window: tuple[float, float] | None = None,
) -> dict[str, object]:
    """Return the metrics of a run of ``duration`` seconds. All keys are always present; None means not measured.

    ``queue_ms`` is the time from a request's scheduled time until it was sent (--max-concurrency, a slow client).

    goodput  duration ("ttft", "tpot", "e2el") -> limit in milliseconds.
    window   (start, end): count only requests scheduled, and tokens received, in this interval.
    """
    all_timings = timings
    if window is not None:
        timings = [timing for timing in timings if window[0] <= timing.scheduled < window[1]]
    good = [timing for timing in timings if timing.error is None]
    inputs = sum(timing.input_tokens for timing in good)
    outputs: float = sum(timing.output_tokens for timing in good)
    if window is not None:
        outputs = sum(_tokens_within(timing, window) for timing in all_timings if timing.error is None)
    within = sum(_within(timing, goodput) for timing in good) if goodput else None
    metrics: dict[str, object] = {
        "completed": len(good),
        "failed": len(timings) - len(good),
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": rate(len(good), duration),
        "request_goodput": None if within is None else rate(within, duration),
        "goodput_share": None if within is None or not timings else within / len(timings),
        "goodput_shares": {
            name: sum(_within(timing, {name: goodput[name]}) for timing in good) / len(timings)
            if name in goodput and timings
            else None
            for name in LIMITED
        },
        "output_throughput": rate(outputs, duration),
        "total_token_throughput": rate(inputs + outputs, duration),
        "max_output_tokens_per_s": _peak_output_tokens(good),
        "max_concurrent_requests": _peak_concurrency(timings),
    }
    metrics.update(milliseconds("ttft", [timing.ttft for timing in good]))
    metrics.update(milliseconds("tpot", [timing.tpot for timing in good if timing.tpot is not None]))
    metrics.update(milliseconds("itl", [gap for timing in good for gap in timing.itl]))
    metrics.update(milliseconds("e2el", [timing.e2el for timing in good]))
    metrics.update(milliseconds("scheduled_e2el", [timing.scheduled_e2el for timing in good]))
    metrics.update(milliseconds("queue", [timing.sent - timing.scheduled for timing in timings if timing.sent]))
    metrics["first_error"] = next((timing.error for timing in timings if timing.error), None)
    return metrics


def _within(timing: Timing, goodput: Mapping[str, float]) -> bool:
    measured = {"ttft": timing.ttft, "tpot": timing.tpot or 0.0, "e2el": timing.e2el}
    return all(1000 * measured[name] <= limit for name, limit in goodput.items())


def _tokens_within(timing: Timing, window: tuple[float, float]) -> float:
    """Return the number of output tokens received in the window, spread evenly over the chunks of the response."""
    inside = sum(window[0] <= moment < window[1] for moment in timing.token_times)
    return timing.output_tokens * inside / len(timing.token_times)


def _peak_output_tokens(timings: Sequence[Timing]) -> float | None:
    """Return the maximum number of output tokens received within one second of the run."""
    if not timings:
        return None
    start = min(timing.sent for timing in timings)
    seconds: dict[int, float] = {}
    for timing in timings:
        # A chunk may carry several tokens; spread those of a response evenly over its chunks.
        tokens_per_chunk = timing.output_tokens / len(timing.token_times)
        for moment in timing.token_times:
            second = int(moment - start)
            seconds[second] = seconds.get(second, 0.0) + tokens_per_chunk
    return max(seconds.values())


def _peak_concurrency(timings: Sequence[Timing]) -> int:
    changes = [(timing.sent, 1) for timing in timings if timing.sent]
    changes += [(timing.ended, -1) for timing in timings if timing.sent]
    peak = current = 0
    for _, change in sorted(changes):
        current += change
        peak = max(peak, current)
    return peak


def detailed(timings: Sequence[Timing], started: float) -> dict[str, list[object]]:
    """Return per-request timings in seconds, under the names of vLLM's --save-detailed."""
    return {
        "input_lens": [timing.input_tokens for timing in timings],
        "output_lens": [timing.output_tokens for timing in timings],
        "start_times": [timing.sent - started for timing in timings],
        "queue_times": [timing.sent - timing.scheduled for timing in timings],
        "ttfts": [timing.ttft if timing.token_times else None for timing in timings],
        "itls": [timing.itl for timing in timings],
        "latencies": [timing.e2el if timing.token_times else None for timing in timings],
        "generated_texts": [timing.text for timing in timings],
        "errors": [timing.error or "" for timing in timings],
    }
