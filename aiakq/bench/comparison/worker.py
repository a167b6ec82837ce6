"""The process of one side of ``bench ab``: loads a model once, then measures a batch whenever it is told to.

It is run as a script by the interpreter of that side, so that ``aiakq`` is whatever is installed or put in front there:
nothing of this package is imported but ``LLM`` and ``SamplingParams``, which older versions have, too.

A line of JSON comes in, a line of JSON goes out: first what was loaded; then, for ``{"seed": 7}``, the seconds of one
batch. An empty line ends the process.
"""

from __future__ import annotations

import bisect
import hashlib
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
    waits = Waits(llm.engine)
    facts = dict(getattr(llm.engine, "facts", {}))
    answers.write(json.dumps({"load_s": loaded, "aiakq": aiakq.__file__, "facts": facts}, default=str) + "\n")
    for line in sys.stdin:
        if not line.strip():
            break
        answers.write(json.dumps(measure(llm, settings, json.loads(line)["seed"], waits)) + "\n")


class Waits:
    """How long this thread was ready to run while others had the processor, step by step of an engine.

    Everything is 0 where the system does not say, or for an engine without ``step``.
    """

    def __init__(self, engine: Any) -> None:
        self._steps: list[tuple[float, float]] = []
        step = getattr(engine, "step", None)
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None
        if step is None or self._file is None:
            return

        def watched(*arguments: Any) -> Any:
            output = step(*arguments)
            self._steps.append((time.monotonic(), self.now()))
            return output

        engine.step = watched

    def now(self) -> float:
        """Seconds since this thread began."""
        return 0.0 if self._file is None else int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    def begin(self) -> float:
        """Forget the steps so far; returns ``now()``."""
        self._steps.clear()
        return self.now()

    def until(self, moment: float, began: float) -> float:
        """Seconds waited until the last step that ended by ``moment``, by the engine's clock; ``began`` before any."""
        index = bisect.bisect_right(self._steps, moment, key=lambda step: step[0])
        return self._steps[index - 1][1] if index else began


def measure(llm: Any, settings: Mapping[str, Any], seed: int, waits: Waits) -> dict[str, Any]:
    """One batch of random prompts: seconds until all have their first token, seconds per step after that, peak memory.

    Of both there is the time by the clock (``wall``), and without the time in which others had the processor. The
    digest is of the tokens, which two sides that compute the same have in common.
    """
    from aiakq import SamplingParams

    rng, vocab_size = random.Random(seed), llm.engine.limits.vocab_size
    length, output_len = settings["input_len"], settings["output_len"]
    prompts = [
        {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(length)]} for _ in range(settings["batch_size"])
    ]
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    began = waits.begin()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    times = [output.metrics for output in outputs]
    first, last = max(each.first_token_time for each in times), max(each.last_token_time for each in times)
    wall = first - min(each.arrival_time for each in times), last - first
    waited = waits.until(first, began) - began, waits.until(last, began) - waits.until(first, began)
    steps = max(1, output_len - 1)
    return {
        "prefill_wall_s": wall[0],
        "decode_wall_s": wall[1] / steps,
        "prefill_s": wall[0] - waited[0],
        "decode_s": (wall[1] - waited[1]) / steps,
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
