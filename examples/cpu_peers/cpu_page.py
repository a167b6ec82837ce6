"""The section of docs/performance.md from what examples/bench_cpu.py measured."""

from __future__ import annotations

import datetime
import statistics
import textwrap
from collections.abc import Callable
from typing import Any

import shape
from contenders import KINDS, Row
from neighbours import NOISY
from timing import CELLS

Result = dict[str, Any]
#: Cell -> the head of its column.
COLUMNS = {"decode": "decode, 1", "batch": "decode, 16", "prefill": "prefill, 512", "prefill128": "prefill, 128"}
#: Tokens in the cache while tokens are generated, on average.
CONTEXT = CELLS["decode"][1] + CELLS["decode"][2] / 2
#: Tokens for which our engine is given pages (speed_aiakq.py).
KV_TOKENS = 96 * 16
HEAD = """\
## One model shape, every engine: a plain CPU

Written by `make bench-cpu`. A Llama of 1.04 B random parameters (hidden 2048, 16 layers, MLP 8192, 32 heads, 8 of them
for keys and values, vocabulary 32000, output layer tied to the embedding). Tokens per second, medians:

- *decode, 1*: one sequence, 128 tokens after a prompt of 128; *decode, 16*: 16 sequences at once, 32 tokens each after
  prompts of 32; *prefill*: prompts of 512 and 128 tokens. Greedy, nothing reused from prompt to prompt.
- *limit*: what reading alone would allow at *decode, 1*: the best streaming read measured ({read:.1f} GB/s) over the
  bytes that a token must read, that is all weights as that engine stores them and its keys and values. *of it*: the
  part that is reached.
- *load*: from files in the page cache to an engine that answers, without imports; for llama.cpp, whose files are
  mapped, until a program has read one token. *peak*: the most memory the process ever had resident; *grew*: without
  what it had before it began to load (Python and its packages). *read*: the best streaming read just before the row
  was measured; where it differs from the others, so did the machine.

Each engine runs in a process of its own on all cores, what competes one after the other, in rounds forwards and
backwards through the rows. **Bold** is the best of a kind.
"""


#: Where the reader has seen the other.
SHORT_HEAD = """\
## The same on a processor without VNNI

As above, where no instruction multiplies bytes and adds up: the native kernels for {isa}. The best streaming read was
{read:.1f} GB/s.
"""


def name(results: Result) -> str:
    """The section that these results belong in: processors with and without VNNI have one each."""
    return "bench-cpu" if "avx512_vnni" in results["machine"]["flags"] else "bench-cpu-without-vnni"


def section(results: Result) -> str:
    """The whole section."""
    rows = {slug: summary(row) for slug, row in results["rows"].items()}
    read = max((row["read"] for row in rows.values() if "cells" in row), default=0.0)
    head = HEAD if name(results) == "bench-cpu" else SHORT_HEAD
    parts = [head.format(read=read, isa="AVX-512" if "avx512f" in results["machine"]["flags"] else "AVX2")]
    for kind, title in KINDS.items():
        mine = [row for row in rows.values() if row["kind"] == kind]
        if mine:
            parts += [f"### {title}", "", *table(mine, read), ""]
    parts += ["### Aims", "", *aims(rows, read), ""]
    parts += ["### Where another is ahead", "", *ahead(rows), ""]
    parts += kernel_section(results["kernels"])
    parts += [about(results, rows)]
    return "\n".join(parts)


def summary(row: Result) -> Result:
    """A row with medians over all samples of all its processes; no ``cells`` where there is none."""
    kept = {key: row[key] for key in ("tool", "name", "kind", "weights", "bytes", "disk")}
    samples = row["samples"]
    if not samples:
        return kept | {"why_none": row["why_none"]}
    cells = {name: [value for sample in samples for value in sample["cells"][name]] for name in COLUMNS}
    return kept | {
        "cells": {name: statistics.median(values) for name, values in cells.items()},
        "load": statistics.median(sample["load_s"] for sample in samples),
        "peak": max(sample["rss_peak"] for sample in samples),
        "grew": max(sample["rss_peak"] - sample["rss_before"] for sample in samples),
        "read": max(sample["read_gbps"] for sample in samples),
        "reads": [sample["read_gbps"] for sample in samples],
        "busy": max(sample["busy"] for sample in samples),
        "at": [sample["at"] for sample in samples],
        "commits": sorted({sample["commit"] for sample in samples}),
        "versions": samples[-1]["versions"],
        "facts": samples[-1].get("facts", {}),
    }


def bytes_of(row: Row, file_bytes: int) -> int | None:
    """What a token reads: from the layout, or from the size of the file and a cache of 16-bit numbers."""
    if "/" in row.weights:
        return file_bytes + shape.kv_bytes(CONTEXT, 2) if file_bytes else None
    return shape.bytes_per_token(row.weights, CONTEXT, 4 if row.weights == "float32" else 2)


def table(rows: list[Result], read: float) -> list[str]:
    heads = ["engine", "weights", *COLUMNS.values(), "limit", "of it", "load, s", "peak, MB", "grew, MB", "read, GB/s"]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    best = {name: max((row["cells"][name] for row in rows if "cells" in row), default=0.0) for name in COLUMNS}
    for row in rows:
        words = [row["tool"], row["name"]]
        if "cells" not in row:
            lines.append("| " + " | ".join([*words, row["why_none"]] + [""] * (len(heads) - 3)) + " |")
            continue
        for name, value in row["cells"].items():
            words.append(f"**{value:.1f}**" if value == best[name] else f"{value:.1f}")
        limit = read * 1e9 / row["bytes"] if row["bytes"] else None
        words += ["", ""] if limit is None else [f"{limit:.1f}", f"{100 * row['cells']['decode'] / limit:.0f} %"]
        words += [f"{row['load']:.1f}", f"{row['peak'] / 1e6:.0f}", f"{row['grew'] / 1e6:.0f}"]
        words.append(f"{row['read']:.1f}")
        lines.append("| " + " | ".join(words) + " |")
    return lines


def aims(rows: dict[str, Result], read: float) -> list[str]:
    """What the runtime is meant to reach, and what it reaches."""

    def value(slug: str, cell: str) -> float | None:
        row = rows.get(slug, {})
        return row["cells"][cell] if "cells" in row else None

    def limit(slug: str, cell: str) -> float | None:
        row = rows.get(slug, {})
        return read * 1e9 / row["bytes"] if row.get("bytes") else None

    w4, w8, w8a8 = "aiakq-w4a16-g128", "aiakq-w8a16", "aiakq-w8a8"
    of_vllm, of_llama = ("vllm-w8a8",), ("llama-cpp-q8-0",)
    in_batches = ("vllm-w8a8", "openvino-int4-g128", "openvino-int8")
    wanted: list[tuple[str, str, tuple[str, ...], str, Callable[[str, str], float | None], float]] = [
        ("decode, W4A16 over llama.cpp Q4_0", w4, ("llama-cpp-q4-0",), "decode", value, 1.3),
        ("decode, W8A16 over llama.cpp Q8_0", w8, of_llama, "decode", value, 1.3),
        ("decode, W8A8 over llama.cpp Q8_0", w8a8, of_llama, "decode", value, 1.3),
        ("decode, W4A16 over its limit", w4, (w4,), "decode", limit, 0.75),
        ("decode, W8A16 over its limit", w8, (w8,), "decode", limit, 0.75),
        ("decode, W8A8 over its limit", w8a8, (w8a8,), "decode", limit, 0.75),
        ("prefill of 512, W8A8 over vLLM's", w8a8, of_vllm, "prefill", value, 1.3),
        ("prefill of 512, W4A16 over llama.cpp Q4_0", w4, ("llama-cpp-q4-0",), "prefill", value, 3.0),
        ("decode of 16, W8A8 over the best of vLLM W8A8 and OpenVINO", w8a8, in_batches, "batch", value, 1.5),
        ("decode of 16, W4A16 over the best of vLLM W8A8 and OpenVINO", w4, in_batches, "batch", value, 1.5),
    ]
    lines = ["| what | reached | aim | |", "|---|---:|---:|---|"]
    for words, ours, theirs, cell, other, aim in wanted:
        mine = value(ours, cell)
        against = [found for found in (other(slug, cell) for slug in theirs) if found]
        if mine is None or not against:
            lines.append(f"| {words} | not measured | {aim} | |")
            continue
        ratio = mine / max(against)
        lines.append(f"| {words} | {ratio:.2f} | {aim} | {'reached' if ratio >= aim else 'not reached'} |")
    for slug in (w4, w8, w8a8):
        row = rows.get(slug, {})
        if "cells" in row:
            pages = shape.kv_bytes(KV_TOKENS, 2 if row["facts"].get("dtype", "").startswith("bfloat16") else 4)
            times = row["grew"] / (row["disk"] + pages)
            lines.append(
                f"| memory, {row['name']} over its files and KV pages | {times:.2f} | at most 1.1 | "
                f"{'reached' if times <= 1.1 else 'not reached'} |"
            )
    if "load" in rows.get(w4, {}):
        seconds = rows[w4]["load"]
        lines.append(f"| load of W4A16, s | {seconds:.1f} | below 5 | {'reached' if seconds < 5 else 'not reached'} |")
    return lines


def ahead(rows: dict[str, Result]) -> list[str]:
    """Every cell in which an engine beats the best of ours with weights of the same kind."""
    lines = []
    for kind, title in KINDS.items():
        mine = [row for row in rows.values() if row["kind"] == kind and row["tool"] == "aiakq" and "cells" in row]
        if not mine:
            continue
        for row in rows.values():
            if row["kind"] != kind or row["tool"] == "aiakq" or "cells" not in row:
                continue
            better = []
            for name, head in COLUMNS.items():
                ours = max(other["cells"][name] for other in mine)
                if row["cells"][name] > ours:
                    better.append(f"{head}: {row['cells'][name]:.1f} against {ours:.1f}")
            for key, head, unit in (("load", "load", 1.0), ("grew", "memory", 1e6)):
                ours = min(other[key] for other in mine)
                if row[key] < ours:
                    ends = "s" if key == "load" else "MB"
                    digits = 1 if key == "load" else 0
                    better.append(
                        f"{head}: {row[key] / unit:.{digits}f} {ends} against {ours / unit:.{digits}f} {ends}"
                    )
            if better:
                lines.append(f"- {title}, {row['tool']} {row['name']}: {'; '.join(better)}.")
    return lines or ["Nowhere, in what was measured."]


def kernel_section(kernels: Result) -> list[str]:
    """One layer alone."""
    samples = kernels["samples"]
    if not samples:
        return []
    by_name: dict[str, dict[int, Result]] = {}
    failures: list[str] = []
    for cell in samples[-1]["table"]:
        if "failed" in cell:
            failures.append(f"{cell['name']}: {cell['failed']}")
        else:
            by_name.setdefault(cell["name"], {})[cell["m"]] = cell
    rows = sorted({cell["m"] for found in by_name.values() for cell in found.values()})
    lines = [
        "### One linear layer alone",
        "",
        "8192 outputs, 2048 inputs, no engine around it: GB/s of weights (scales included) up to 16 rows, each call",
        "with other weights, so that they come from memory; GOP/s from 16 rows on. *exact* multiplies floats, the",
        "other weight-only rows of ours round every 32 inputs to 8 bits.",
        "",
        "| product | " + " | ".join(f"{m} GB/s" for m in rows if m <= 16) + " | "
        + " | ".join(f"{m} GOP/s" for m in rows if m >= 16) + " |",
        "|---|" + "---:|" * (sum(m <= 16 for m in rows) + sum(m >= 16 for m in rows)),
    ]  # fmt: skip
    for name, found in by_name.items():
        reads = [f"{found[m]['bytes'] / found[m]['ms'] / 1e6:.1f}" if m in found else "" for m in rows if m <= 16]
        products = [f"{2e-6 * m * 8192 * 2048 / found[m]['ms']:.0f}" if m in found else "" for m in rows if m >= 16]
        lines.append("| " + " | ".join([name, *reads, *products]) + " |")
    return [*lines, "", *(f"Not measured: {line}." for line in failures), *([""] if failures else [])]


def about(results: Result, rows: dict[str, Result]) -> str:
    """Machine, versions, dates, and what a reader must know before trusting the numbers."""
    measured = [row for row in rows.values() if "cells" in row]
    machine = results["machine"]
    versions: dict[str, str] = {}
    for row in measured:
        versions |= row["versions"]
    tools = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    commits = sorted({name for row in measured if row["tool"] == "aiakq" for name in row["commits"]})
    lines = [
        f"Machine: {machine['cpu']} ({', '.join(machine['flags'])}), {machine['threads']} threads, "
        f"{machine['memory_gb']} GB. {tools}. aiakq at {', '.join(commits) or 'no commit yet'}.",
    ]
    facts: dict[str, str] = next((row["facts"] for row in measured if row["tool"] == "aiakq"), {})
    if facts:
        lines.append(f"Ours computes with: {facts.get('linear layers', '')}; attention: {facts.get('attention', '')}.")
    times = [at for row in measured for at in row["at"]]
    if times:
        first, last = (
            datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M")
            for at in (min(times), max(times))
        )
        reads = [read for row in measured for read in row["reads"]]
        lines.append(
            f"Measured between {first} and {last} UTC; streaming reads before each process {min(reads):.1f} to "
            f"{max(reads):.1f} GB/s. Again: `make bench-cpu`; ours alone: `python examples/bench_cpu.py --only aiakq "
            f"--fresh`; the other engines are made by `python examples/bench_cpu.py --install`."
        )
    noisy = [f"{row['tool']} {row['name']}" for row in measured if row["busy"] >= NOISY]
    if noisy:
        lines.append(f"Others used the processors while these were measured, so they are too slow: {', '.join(noisy)}.")
    return "\n\n".join(textwrap.fill(line, 120, break_on_hyphens=False) for line in lines)
