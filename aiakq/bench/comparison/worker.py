"""The process of one side of ``bench ab``: loads a model once, then measures a batch whenever it is told to.

It is run as a script by the interpreter of that side, so that ``aiakq`` is whatever is installed or put in front there:
nothing of this package is imported but ``LLM`` and ``SamplingParams``, which older versions have, too.

A line of JSON comes in, a line of JSON goes out: first what was loaded; then, for ``{"seed": 7}``, the seconds of one
batch. An empty line ends the process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any


def main(settings: Mapping[str, Any]) -> None:
    """Load and answer. ``settings``: engine, batch_size, input_len, output_len."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    started = time.perf_counter()
    try:
        import aiakq

        llm = aiakq.LLM(**settings["engine"])
    except Exception as problem:
        text = " ".join(str(problem).split()) or type(problem).__name__
        answers.write(json.dumps({"error": text[:500]}) + "\n")
        return
    loaded = time.perf_counter() - started
    step_times = StepEnds(llm.engine)
    facts = dict(getattr(llm.engine, "facts", {}))
    answers.write(json.dumps({"load_s": loaded, "aiakq": aiakq.__file__, "facts": facts}, default=str) + "\n")
    for line in sys.stdin:
        if not line.strip():
            break
        answers.write(json.dumps(measure(llm, settings, json.loads(line)["seed"], step_times)) + "\n")


class StepEnds:
    """The ends of an engine's steps, by its clock; none for an engine without ``step``."""

    def __init__(self, engine: Any) -> None:
        self._ends: list[float] = []
        step = getattr(engine, "step", None)
        if step is None:
            return

        def timed(*arguments: Any) -> Any:
            output = step(*arguments)
            self._ends.append(time.monotonic())
            return output

        engine.step = timed

    def clear(self) -> None:
        """Forget the steps so far."""
        self._ends.clear()

    def durations(self, first: float, last: float) -> list[float]:
        """Seconds from each step's end to the next one's, of the steps that ended from ``first`` to ``last``."""
        ends = [end for end in self._ends if first <= end <= last]
        return [end - before for before, end in itertools.pairwise(ends)]


def measure(llm: Any, settings: Mapping[str, Any], seed: int, step_times: StepEnds) -> dict[str, Any]:
    """One batch of random prompts: seconds until all have their first token, seconds per step after that, peak memory.

    ``decode_s`` is the lower quartile of the steps: a step takes less than a time slice of the scheduler, so even on a
    busy machine many are undisturbed. ``decode_mean_s`` is the mean. Time that a thread waits for a processor is not
    subtracted: the threads share the work, so while one waits, the others take over its part.
    The digest is of the tokens, which two sides that compute the same have in common.
    """
    from aiakq import SamplingParams

    rng, vocab_size = random.Random(seed), llm.engine.limits.vocab_size
    length, output_len = settings["input_len"], settings["output_len"]
    prompts = [
        {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(length)]} for _ in range(settings["batch_size"])
    ]
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    step_times.clear()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    times = [output.metrics for output in outputs]
    first, last = max(each.first_token_time for each in times), max(each.last_token_time for each in times)
    mean = (last - first) / max(1, output_len - 1)
    steps = sorted(step_times.durations(first, last))
    return {
        "prefill_s": first - min(each.arrival_time for each in times),
        "decode_s": steps[len(steps) // 4] if steps else mean,
        "decode_mean_s": mean,
        "peak_bytes": peak_bytes(),
        "digest": digest([list(output.outputs[0].token_ids) for output in outputs]),
    }


def digest(tokens: Sequence[Sequence[int]]) -> str:
    """A short name of generated tokens."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def peak_bytes() -> int | None:
    """The most memory this process has held at any time; None where the system does not say."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
