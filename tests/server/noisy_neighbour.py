"""Measure how much one client's requests (the noisy neighbour) delay the tokens of another client's stream.

    python tests/server/noisy_neighbour.py fair-share    32 long prompts of one client, with and without --fair-share
    python tests/server/noisy_neighbour.py limits        every body of limit_bodies.py, with --fair-share

Prints a table, and one line of JSON; the exit code is 1 if a limit that docs/serving.md states is exceeded.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from limit_bodies import BODIES
from plain_client import Pings, connect, post, send
from raw_http import MODEL, TIMEOUT, state

from aiakq.server.background import RunningServer, start_in_background

#: API keys of the client with the stream and of the noisy neighbour.
STREAM_KEY, NOISY_KEY = KEYS = ("stream", "noisy")
#: Limits: the factor by which a stream may be slower, and a larger one for at most so many seconds.
MAX_SLOWDOWN, MAX_BRIEF_SLOWDOWN, MAX_BRIEF_SECONDS = 5.0, 20.0, 1.0
#: Limits: seconds until /version responds, and megabytes by which memory may grow.
MAX_VERSION_SECONDS, MAX_GROWTH = 0.1, 64.0
NUM_LONG_PROMPTS, LONG_PROMPT, LONG_OUTPUT = 32, 900, 60


class Stream(threading.Thread):
    """Streams one response after another until ``stop``.

    gaps  for each token when it arrived and the time since the previous one, in seconds.
    """

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self.gaps: list[tuple[float, float]] = []
        self._connection = connect(server)
        self._ended = threading.Event()

    def run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 0}
        while not self._ended.is_set():
            send(self._connection, "POST", "/v1/completions", STREAM_KEY, json.dumps(body).encode())
            last, tail = 0.0, b""
            while not tail.endswith(b"0\r\n\r\n"):
                data = self._connection.recv(1 << 16)
                if not data:
                    raise EOFError("the stream was cut off")
                now = time.monotonic()
                if last and b'"text"' in data:
                    self.gaps.append((now, now - last))
                last, tail = now if b'"text"' in data else last, (tail + data)[-8:]
                if self._ended.is_set():
                    return

    def stop(self) -> None:
        self._ended.set()
        self.join()
        self._connection.close()

    def between(self, began: float, ended: float) -> list[tuple[float, float]]:
        return [(at, gap) for at, gap in self.gaps if began <= at <= ended]


@dataclass
class Slowdown:
    """Inter-token latencies of the stream; ``alone`` is the median without other requests, in milliseconds."""

    alone: float
    gaps: list[tuple[float, float]] = field(repr=False)

    @property
    def median(self) -> float:
        return 1000 * statistics.median(gap for _, gap in self.gaps)

    @property
    def mean(self) -> float:
        return 1000 * statistics.fmean(gap for _, gap in self.gaps)

    @property
    def worst(self) -> float:
        return 1000 * max(gap for _, gap in self.gaps)

    @property
    def seconds_over(self) -> float:
        """Seconds in which the latency was more than MAX_BRIEF_SLOWDOWN times ``alone``."""
        return sum(gap for _, gap in self.gaps if 1000 * gap > MAX_BRIEF_SLOWDOWN * self.alone)

    def report(self) -> dict[str, float]:
        times = {"median_ms": self.median, "mean_ms": self.mean, "worst_ms": self.worst}
        factors = {name.removesuffix("_ms") + "_x": value / self.alone for name, value in times.items()}
        return {name: round(value, 1) for name, value in {**times, **factors}.items()}


def start(**arguments: Any) -> RunningServer:
    server = start_in_background(
        {"model": str(MODEL), "dtype": "float32", "api_key": list(KEYS), "num_gpu_blocks_override": 4097, **arguments},
        timeout=4 * TIMEOUT,
    )
    post(server, "/v1/completions", b'{"prompt":"Once","max_tokens":3}', NOISY_KEY)
    return server


def latency_alone(stream: Stream, seconds: float = 3.0) -> float:
    """Return the stream's median inter-token latency in milliseconds while nothing else runs."""
    time.sleep(0.5)
    began = time.monotonic()
    time.sleep(seconds)
    return 1000 * statistics.median(gap for _, gap in stream.between(began, time.monotonic()))


def long_prompts() -> list[bytes]:
    rng = random.Random(5)
    ids = [[rng.randrange(300, 4000) for _ in range(LONG_PROMPT)] for _ in range(NUM_LONG_PROMPTS)]
    return [json.dumps({"prompt": prompt, "max_tokens": LONG_OUTPUT, "ignore_eos": True}).encode() for prompt in ids]


def measure_long_prompts(fair: bool) -> dict[str, Any]:
    """Measure the slowdown by 32 long prompts that arrive at once."""
    with start(fair_share=fair) as server:
        stream = Stream(server)
        stream.start()
        alone = latency_alone(stream)
        began = time.monotonic()
        with ThreadPoolExecutor(NUM_LONG_PROMPTS) as pool:
            answers = list(pool.map(lambda body: post(server, "/v1/completions", body, NOISY_KEY), long_prompts()))
        assert {status for status, *_ in answers} == {200}, "a long prompt failed"
        ended = time.monotonic()
        stream.stop()
    found = Slowdown(alone, stream.between(began, ended))
    return {"alone_ms": round(alone, 1), **found.report(), "other_s": round(ended - began, 1)}


def fair_share() -> dict[str, Any]:
    found = {"fair" if fair else "unfair": measure_long_prompts(fair) for fair in (False, True)}
    print(
        "| --fair-share | alone | median | mean | worst | the 32 prompts |\n|---|---|---|---|---|---|", file=sys.stderr
    )
    for name, one in found.items():
        cells = [f"{one[f'{what}_ms']} ms, {one[f'{what}_x']} x" for what in ("median", "mean", "worst")]
        on = "on" if name == "fair" else "off"
        print(f"| {on} | {one['alone_ms']} ms | {' | '.join(cells)} | {one['other_s']} s |", file=sys.stderr)
    broken = [name for name in ("median_x", "mean_x") if found["fair"][name] > MAX_SLOWDOWN]
    return {**found, "broken": broken}


def limits(only: str = "") -> dict[str, Any]:
    """Measure the slowdown by each body at a limit of the server."""
    found: dict[str, Any] = {}
    print("| body | median | worst | over 20 x | /version | memory |\n|---|---|---|---|---|---|", file=sys.stderr)
    # Few pages, because first use of a page adds memory that no body leaves behind.
    with start(fair_share=True, num_gpu_blocks_override=513) as server:
        stream = Stream(server)
        stream.start()
        alone = latency_alone(stream)
        # The first bodies make the server grow to its lasting size.
        for path, body, status in BODIES.values():
            assert post(server, path, body, NOISY_KEY)[0] == status
        memory = settled_memory(server, 0.0)
        for name, (path, body, _) in BODIES.items():
            if only not in name:
                continue
            version = Pings(server, "/version", 0.02, STREAM_KEY)
            version.start()
            began = time.monotonic()
            post(server, path, body, NOISY_KEY)
            time.sleep(0.1)
            slow = Slowdown(alone, stream.between(began, time.monotonic()))
            one = {
                **slow.report(),
                "over_s": round(slow.seconds_over, 2),
                "version_ms": round(1000 * version.stop()),
                "kept_mb": round(settled_memory(server, memory + MAX_GROWTH) - memory, 1),
            }
            fits = one["kept_mb"] <= MAX_GROWTH and one["version_ms"] <= 1000 * MAX_VERSION_SECONDS
            one["good"] = fits and one["over_s"] <= MAX_BRIEF_SECONDS
            found[name] = one
            print(
                f"| {name} | {one['median_ms']} ms, {one['median_x']} x | {one['worst_ms']} ms, {one['worst_x']} x | "
                f"{one['over_s']} s | {one['version_ms']} ms | {one['kept_mb']} MB |" + (" broken" * (not one["good"])),
                file=sys.stderr,
                flush=True,
            )
        stream.stop()
    return {"alone_ms": round(alone, 1), **found, "broken": [name for name, one in found.items() if not one["good"]]}


def settled_memory(server: RunningServer, enough: float, timeout: float = 15.0) -> float:
    """Return the least memory of the server and its children in megabytes within ``timeout`` seconds.

    It returns at once when memory is at most ``enough``.
    """
    deadline = time.monotonic() + timeout
    least = memory_of(server)
    while time.monotonic() < deadline and least > enough:
        time.sleep(0.5)
        least = min(least, memory_of(server))
    return least


def memory_of(server: RunningServer) -> float:
    pids, total = [server.process.pid], 0.0
    while pids:
        pid = pids.pop()
        try:
            total += state(pid)["rss_mb"]
            with open(f"/proc/{pid}/task/{pid}/children") as children:
                pids += [int(child) for child in children.read().split()]
        except (OSError, TypeError):  # the process has just ended
            continue
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measurement", choices=("fair-share", "limits"))
    parser.add_argument("--only", default="", help="bodies whose names contain this")
    args = parser.parse_args()
    found = fair_share() if args.measurement == "fair-share" else limits(args.only)
    print(json.dumps(found))
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
