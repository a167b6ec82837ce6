"""Measure the example model, original and quantized four ways, and write docs/performance.md. Run by ``make bench``.

Everything is measured in one run on one machine, so the rows are comparable; absolute values are those of this machine.
The baseline is transformers with the same batches and threads.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import sections

from aiakq.system.threads import spin_briefly

ROOT = Path(__file__).resolve().parent.parent
MODEL = "examples/tinybooks"
OUT = Path(os.environ.get("OUT", "out/bench"))
METHODS = ("weight_only_int8", "smooth_quant", "awq", "gptq")
DTYPES = ("float32", "bfloat16")
BATCHES = (1, 16)
INPUT, OUTPUT, REPEATS = 32, 64, 5


def main() -> None:
    os.chdir(ROOT)
    spin_briefly()
    OUT.mkdir(parents=True, exist_ok=True)
    for method in METHODS:
        if not (OUT / method).exists():
            words = ("-i", MODEL, "-o", str(OUT / method), "-quant_type", method, "-t", "bf16", "--no-eval", "--json")
            aiakq("quantize", *words)
    models = {"original": MODEL, **{method: str(OUT / method) for method in METHODS}}
    latency = [
        measure(name, path, dtype, batch) for name, path in models.items() for dtype in DTYPES for batch in BATCHES
    ]
    latency += [transformers_baseline(dtype, batch) for dtype in DTYPES for batch in BATCHES]
    serving = [serve(name, path) for name, path in models.items()]
    results = {"latency": latency, "serving": serving}
    (OUT / "benchmark.json").write_text(json.dumps(results, indent=1))
    sections.put(ROOT / "docs" / "performance.md", "bench", section(results))


def aiakq(*words: str) -> dict:
    """Run a command and return its JSON."""
    program = Path(sys.executable).with_name("aiakq")
    done = subprocess.run([str(program), *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def measure(name: str, path: str, dtype: str, batch: int) -> dict:
    """One row: ``aiakq bench latency`` with one batch size."""
    numbers = ("--input-len", INPUT, "--output-len", OUTPUT, "--batch-size", batch, "--num-iters", REPEATS)
    result = aiakq("bench", "latency", path, "--dtype", dtype, *map(str, numbers))
    return {
        "model": name,
        "dtype": dtype,
        "batch": batch,
        "tokens_per_s": batch * OUTPUT * 1e3 / result["latency_ms"]["p50"],
        "first_ms": result["ttft_ms"]["p50"],
        "environment": result["environment"],
    }


def transformers_baseline(dtype: str, batch: int) -> dict:
    """The same batches through transformers.generate."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, dtype)).eval()
    seconds = []
    for repeat in range(REPEATS + 1):
        ids = torch.randint(4, 4096, (batch, INPUT), generator=torch.Generator().manual_seed(repeat))
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=OUTPUT, max_new_tokens=OUTPUT, do_sample=False
        )
        seconds.append(time.perf_counter() - began)
    rate = batch * OUTPUT / statistics.median(seconds[1:])
    return {"model": "transformers", "dtype": dtype, "batch": batch, "tokens_per_s": rate, "first_ms": None}


def serve(name: str, path: str) -> dict:
    """One row: ``aiakq bench serve`` with a server of its own."""
    numbers = ("--num-prompts", 256, "--max-concurrency", 64, "--input-len", 64, "--output-len", 64)
    result = aiakq("bench", "serve", path, "--dtype", "float32", *map(str, numbers))
    keys = ("output_throughput", "request_throughput")
    return {"model": name, **{key: result[key] for key in keys}, "ttft": result["ttft_ms"], "tpot": result["tpot_ms"]}


def section(results: dict) -> str:
    """The two tables of docs/performance.md, and the machine."""
    environment = results["latency"][0]["environment"]
    lines = [
        f"Machine: {environment['device_name']}, {environment['threads']} threads, torch {environment['torch']}, "
        f"transformers {environment['transformers']}, commit {environment['commit']}.",
        "",
        f"## One batch, {INPUT} tokens in, {OUTPUT} out (median of {REPEATS})",
        "",
        "| model | dtype | batch | output tokens/s | first token, ms |",
        "|---|---|---|---|---|",
    ]
    for row in results["latency"]:
        first = "" if row["first_ms"] is None else f"{row['first_ms']:.1f}"
        lines.append(f"| {row['model']} | {row['dtype']} | {row['batch']} | {row['tokens_per_s']:.0f} | {first} |")
    lines += [
        "",
        "## Serving: 256 requests, 64 concurrent, 64 tokens in, 64 out, float32, client on the same cores",
        "",
        "| model | output tokens/s | requests/s | first token p50 / p99, ms | per token p50 / p99, ms |",
        "|---|---|---|---|---|",
    ]
    for row in results["serving"]:
        first, per = (f"{row[key]['p50']:.0f} / {row[key]['p99']:.0f}" for key in ("ttft", "tpot"))
        lines.append(
            f"| {row['model']} | {row['output_throughput']:.0f} | {row['request_throughput']:.1f} | {first} | {per} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
