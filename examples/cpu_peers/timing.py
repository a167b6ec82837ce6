"""Shared by the scripts in this folder: load an engine, let it generate, and write the times.

Each script runs in the environment of the engine it drives, so this file needs nothing but Python.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

#: Cell -> sequences, tokens of each prompt, tokens generated for each. The first token belongs to the prompt.
CELLS = {"prefill": (1, 512, 1), "decode": (1, 128, 129), "batch": (16, 32, 33)}
#: Limits per process: repetitions of a cell, and seconds after which no further repetition starts.
REPEATS, PATIENCE = 3, 8.0
VOCAB = 32000


class Engine(Protocol):
    """A loaded model."""

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """Generate greedily, ignoring the end of sequence; return the times (time.perf_counter) when all sequences had
        their first token and when all had their last."""


def run(packages: tuple[str, ...], load: Callable[[dict[str, Any]], Engine]) -> None:
    """``script.py REQUEST RESULT``: load what the request file says, measure CELLS, write the result file.

    The request has ``model`` (a folder), ``threads`` and the arguments of ``load``. The load time begins with files in
    the page cache and ends with an engine that accepts requests; imports are not included.
    """
    request = json.loads(Path(sys.argv[1]).read_text())
    before = resident()
    began = time.perf_counter()
    engine = load(request)
    loaded = time.perf_counter() - began
    result: dict[str, Any] = {"load_s": loaded, "rss_before": before, "rss_loaded": peak_resident()}
    draw = random.Random(time.time_ns())
    engine.generate([[draw.randrange(2, VOCAB) for _ in range(40)]], 4)
    cells: dict[str, list[float]] = {name: [] for name in ("prefill", "prefill128", "decode", "batch")}
    for name, (batch, prompt, tokens) in CELLS.items():
        until = time.perf_counter() + PATIENCE
        for _ in range(REPEATS):
            # New prompts every time, so that no prefix is cached.
            prompts = [[draw.randrange(2, VOCAB) for _ in range(prompt)] for _ in range(batch)]
            began = time.perf_counter()
            first, last = engine.generate(prompts, tokens)
            if name == "prefill":
                cells["prefill"].append(prompt / (first - began))
            else:
                cells[name].append(batch * (tokens - 1) / (last - first))
            if name == "decode":
                cells["prefill128"].append(prompt / (first - began))
            if time.perf_counter() > until:
                break
    result |= {"cells": cells, "rss_peak": peak_resident()}
    result["facts"] = getattr(engine, "facts", {})
    result["versions"] = {name: importlib.metadata.version(name) for name in packages}
    Path(sys.argv[2]).write_text(json.dumps(result))


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return _status("VmRSS")


def peak_resident() -> int:
    """Return the peak resident memory of this process in bytes."""
    return _status("VmHWM")


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
