"""Worker process of one side of ``bench ab``: load a model once, then measure one batch per request.

The side's interpreter runs this file as a script, so that it measures the side's ``aiakq``. It imports nothing of aiakq
but ``LLM`` and ``SamplingParams``, which older versions have, too.

It is the other end of a channel (aiakq/system/channel.py), which older versions lack. First it sends facts about the
loaded engine, or a failure; then it answers each request with the result of ``measure``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_LENGTH = struct.Struct(">I")


def main(settings: Mapping[str, Any], sock: socket.socket) -> None:
    """Load the model and answer requests. ``settings``: side, engine, batch_size, input_len, output_len."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the last line tells why it ended
    started = time.perf_counter()
    try:
        import aiakq

        llm = aiakq.LLM(**settings["engine"])
    except Exception as problem:
        text = " ".join(str(problem).split()) or type(problem).__name__
        fields = {"side": settings["side"], "reason": text[:500].rstrip(".")}
        send(sock, {"type": "failure", "id": "side_failed", "fields": fields})
        return
    loaded = time.perf_counter() - started
    step_times = StepEnds(llm.engine)
    facts = dict(getattr(llm.engine, "facts", {}))
    result = {"load_s": loaded, "aiakq": aiakq.__file__, "facts": facts}
    with sock.makefile("rb") as requests:
        while True:
            send(sock, {"type": "reply", "result": result})
            head = requests.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return
            request = msgspec.msgpack.decode(requests.read(*_LENGTH.unpack(head)))
            result = measure(llm, settings, request["seed"], step_times)


def send(sock: socket.socket, record: Mapping[str, object]) -> None:
    """Send one record."""
    body = json.dumps(record, default=str).encode()
    sock.sendall(_LENGTH.pack(len(body)) + body)


class StepEnds:
    """Records when each step of an engine ends (``time.monotonic``); records nothing for an engine without ``step``."""

    def __init__(self, engine: Any) -> None:
        self._ends: list[float] = []
        step = getattr(engine, "step", None)
        if step is None:
            return

        def timed(*arguments: object) -> object:
            output = step(*arguments)
            self._ends.append(time.monotonic())
            return output

        engine.step = timed

    def clear(self) -> None:
        """Discard the recorded times."""
        self._ends.clear()

    def durations(self, first: float, last: float) -> list[float]:
        """Return the seconds between the ends of successive steps that ended in [``first``, ``last``]."""
        ends = [end for end in self._ends if first <= end <= last]
        return [end - previous for previous, end in itertools.pairwise(ends)]


def measure(llm: Any, settings: Mapping[str, Any], seed: int, step_times: StepEnds) -> dict[str, object]:
    """Generate one batch of random prompts and return its measurements.

    prefill_s      seconds until every request has its first token.
    decode_s       lower quartile of the seconds per step after that. A step is shorter than a time slice of the OS
                   scheduler, so even on a busy machine many steps are not preempted.
    decode_mean_s  mean seconds per step. Time in which a thread waits for a processor is included, because the other
                   threads take over its work.
    peak_bytes     peak resident memory of the process so far, or None.
    digest         hash of the generated tokens, equal for sides that compute the same.
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
    """Return a 64-bit hash of generated tokens, in hexadecimal."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def peak_bytes() -> int | None:
    """Return the peak resident memory of this process in bytes, or None if the system does not report it."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
