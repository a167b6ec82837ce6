"""What one client's requests do to another one's stream: how much later its tokens come.

    python tests/server/neighbour.py fair-share    32 long prompts of one client, with and without --fair-share
    python tests/server/neighbour.py limits        every body of limit_bodies.py, with --fair-share

Prints a table, and one line of JSON; the exit code is 1 if a promise of docs/serving.md does not hold.
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
from plain_client import Pings, dial, post, send
from raw_http import MODEL, PATIENCE, state

from aiakq.server.background import RunningServer, start_in_background

#: The neighbour's key, and that of the client whose requests are tried.
KEYS = ("the-neighbour", "the-other")
#: The promises. A stream may be slower by a factor: for long by the first, at most a second by the other.
MOST_SLOWDOWN, MOST_BRIEFLY, BRIEFLY = 5.0, 20.0, 1.0
#: Seconds until /version answers, and megabytes that may stay.
VERSION_WITHIN, MEMORY_WITHIN = 0.1, 64.0
LONG_PROMPTS, LONG_PROMPT, LONG_ANSWER = 32, 900, 60


class Stream(threading.Thread):
    """Streams one answer after the other until ``stop``. ``gaps``: when a token came, and the time since the last."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self.gaps: list[tuple[float, float]] = []
        self._connection = dial(server)
        self._ended = threading.Event()

    def run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 0}
        while not self._ended.is_set():
            send(self._connection, "POST", "/v1/completions", KEYS[0], json.dumps(body).encode())
            last, tail = 0.0, b""
            while not tail.endswith(b"0\r\n\r\n"):
                data = self._connection.recv(1 << 16)
                if not data:
                    raise EOFError("the neighbour's stream was cut off")
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
    """Inter-token latencies of the neighbour in milliseconds, and how many times those without the other client."""

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
        """Seconds in which the latency was more than MOST_BRIEFLY times that alone."""
        return sum(gap for _, gap in self.gaps if 1000 * gap > MOST_BRIEFLY * self.alone)

    def told(self) -> dict[str, float]:
        times = {"median_ms": self.median, "mean_ms": self.mean, "worst_ms": self.worst}
        factors = {name.removesuffix("_ms") + "_x": value / self.alone for name, value in times.items()}
        return {name: round(value, 1) for name, value in {**times, **factors}.items()}


def start(**arguments: Any) -> RunningServer:
    server = start_in_background(
        {"model": str(MODEL), "dtype": "float32", "api_key": list(KEYS), "num_gpu_blocks_override": 4097, **arguments},
        timeout=4 * PATIENCE,
    )
    post(server, "/v1/completions", b'{"prompt":"Once","max_tokens":3}', KEYS[1])
    return server


def alone(stream: Stream, seconds: float = 3.0) -> float:
    """Its median inter-token latency in milliseconds while nothing else runs."""
    time.sleep(0.5)
    began = time.monotonic()
    time.sleep(seconds)
    return 1000 * statistics.median(gap for _, gap in stream.between(began, time.monotonic()))


def long_prompts() -> list[bytes]:
    draw = random.Random(5)
    ids = [[draw.randrange(300, 4000) for _ in range(LONG_PROMPT)] for _ in range(LONG_PROMPTS)]
    return [json.dumps({"prompt": prompt, "max_tokens": LONG_ANSWER, "ignore_eos": True}).encode() for prompt in ids]


def beside_long_prompts(fair: bool) -> dict[str, Any]:
    """What 32 long prompts that come at once do."""
    with start(fair_share=fair) as server:
        stream = Stream(server)
        stream.start()
        base = alone(stream)
        began = time.monotonic()
        with ThreadPoolExecutor(LONG_PROMPTS) as pool:
            answers = list(pool.map(lambda body: post(server, "/v1/completions", body, KEYS[1]), long_prompts()))
        assert {status for status, *_ in answers} == {200}, "the long prompts are answered"
        ended = time.monotonic()
        stream.stop()
    found = Slowdown(base, stream.between(began, ended))
    return {"alone_ms": round(base, 1), **found.told(), "other_s": round(ended - began, 1)}


def fair_share() -> dict[str, Any]:
    found = {"fair" if fair else "unfair": beside_long_prompts(fair) for fair in (False, True)}
    print(
        "| --fair-share | alone | median | mean | worst | the 32 prompts |\n|---|---|---|---|---|---|", file=sys.stderr
    )
    for name, one in found.items():
        cells = [f"{one[f'{what}_ms']} ms, {one[f'{what}_x']} x" for what in ("median", "mean", "worst")]
        on = "on" if name == "fair" else "off"
        print(f"| {on} | {one['alone_ms']} ms | {' | '.join(cells)} | {one['other_s']} s |", file=sys.stderr)
    broken = [name for name in ("median_x", "mean_x") if found["fair"][name] > MOST_SLOWDOWN]
    return {**found, "broken": broken}


def limits(only: str = "") -> dict[str, Any]:
    """What each body at its limits does."""
    found: dict[str, Any] = {}
    print("| body | median | worst | over 20 x | /version | memory |\n|---|---|---|---|---|---|", file=sys.stderr)
    # Few pages: memory that is touched for the first time is no memory that a body left behind.
    with start(fair_share=True, num_gpu_blocks_override=513) as server:
        stream = Stream(server)
        stream.start()
        base = alone(stream)
        # The first bodies make the server grow to the size that it keeps.
        for path, body, status in BODIES.values():
            assert post(server, path, body, KEYS[1])[0] == status
        memory = settled(server, 0.0)
        for name, (path, body, _) in BODIES.items():
            if only not in name:
                continue
            version = Pings(server, "/version", 0.02, KEYS[0])
            version.start()
            began = time.monotonic()
            post(server, path, body, KEYS[1])
            time.sleep(0.1)
            slow = Slowdown(base, stream.between(began, time.monotonic()))
            one = {
                **slow.told(),
                "over_s": round(slow.seconds_over, 2),
                "version_ms": round(1000 * version.stop()),
                "kept_mb": round(settled(server, memory + MEMORY_WITHIN) - memory, 1),
            }
            kept = one["kept_mb"] <= MEMORY_WITHIN and one["version_ms"] <= 1000 * VERSION_WITHIN
            one["good"] = kept and one["over_s"] <= BRIEFLY
            found[name] = one
            print(
                f"| {name} | {one['median_ms']} ms, {one['median_x']} x | {one['worst_ms']} ms, {one['worst_x']} x | "
                f"{one['over_s']} s | {one['version_ms']} ms | {one['kept_mb']} MB |" + (" broken" * (not one["good"])),
                file=sys.stderr,
                flush=True,
            )
        stream.stop()
    return {"alone_ms": round(base, 1), **found, "broken": [name for name, one in found.items() if not one["good"]]}


def settled(server: RunningServer, enough: float, patience: float = 15.0) -> float:
    """Megabytes of the server and its children, when they no longer fall, or are at most ``enough``."""
    deadline = time.monotonic() + patience
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
        except (OSError, TypeError):  # it has just ended
            continue
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("fair-share", "limits"))
    parser.add_argument("--only", default="", help="bodies whose names contain this")
    asked = parser.parse_args()
    found = fair_share() if asked.what == "fair-share" else limits(asked.only)
    print(json.dumps(found))
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
