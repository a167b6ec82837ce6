"""Run llama.cpp's own benchmarks and write their results in the format of timing.py."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from timing import CELLS, REPEATS


def main() -> None:
    """``speed_llamacpp.py REQUEST RESULT``: the request has ``model`` (a GGUF file), ``programs`` and ``threads``."""
    request = json.loads(Path(sys.argv[1]).read_text())
    programs, threads = Path(request["programs"]), str(request["threads"])
    common = ["-m", request["model"], "-t", threads]

    def bench(*words: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [programs / "llama-bench", *common, "-o", "json", *words], stdout=subprocess.PIPE, check=True
        )
        return json.loads(done.stdout)

    began = time.perf_counter()
    bench("-p", "1", "-n", "0", "-r", "1", "--no-warmup")
    loaded = time.perf_counter() - began
    rss_loaded = children_peak()
    _, prompt, tokens = CELLS["decode"]
    long, short = bench("-p", f"{CELLS['prefill'][1]},{prompt}", "-n", "0", "-r", "2")
    (decode,) = bench("-p", "0", "-n", str(tokens - 1), "-d", str(prompt), "-r", str(REPEATS))
    batch, prompt, tokens = CELLS["batch"]
    words = ["-c", "2048", "-b", "2048", "-ub", "512", "-npp", str(prompt), "-ntg", str(tokens - 1), "-npl", str(batch)]
    batches = []
    for _ in range(2):
        done = subprocess.run(
            [programs / "llama-batched-bench", *common, *words, "--output-format", "jsonl"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
        batches.append(lines[-1]["speed_tg"])
    result = {
        "load_s": loaded,
        "rss_before": 0,
        "rss_loaded": rss_loaded,
        "rss_peak": children_peak(),
        "cells": {
            "prefill": long["samples_ts"],
            "prefill128": short["samples_ts"],
            "decode": decode["samples_ts"],
            "batch": batches,
        },
        "facts": {"cpu": decode["cpu_info"], "type": decode["model_type"], "median": statistics.median(batches)},
        "versions": {"llama.cpp": f"of llama-cpp-python {request['version']}"},
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


def children_peak() -> int:
    """Return the peak resident memory of the programs, including the mapped model file."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


if __name__ == "__main__":
    main()
