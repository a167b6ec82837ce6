"""Measure our CPU runtime and other engines on one model shape, and write a section of docs/performance.md.

Run by ``make bench-cpu``. Every engine of examples/cpu_peers/contenders.py runs in its own process, one at a time, in
rounds of alternating order, so that a drift of the machine affects all of them; the memory bandwidth is measured before
each. Samples are stored, so an interrupted run continues where it stopped. Samples of aiakq are repeated when its code
has changed, and so are all samples taken under load from other processes.

    python examples/bench_cpu.py [--only WORDS] [--fresh] [--rounds N] [--no-peers] [--install] [--quiet S]
                                 [--disturbed] [--page]

Engines that are not installed are skipped with a message. ``--install`` installs them, which takes an hour on two
cores.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / "cpu_peers"), str(ROOT / "examples" / "peers"), str(ROOT / "examples")]

import contenders  # noqa: E402
import cpu_page  # noqa: E402
import environments  # noqa: E402
import sections  # noqa: E402
import torch  # noqa: E402
from contenders import OUT, SCRIPTS, Row  # noqa: E402
from machine_load import MAX_OTHERS_SHARE, CpuTime, wait_until_idle  # noqa: E402

KERNELS = "kernels"
#: Time limit of one process, in seconds.
TIMEOUT = 1800
#: The code that aiakq's rows depend on.
SOURCES = ("kernels/**/*.py", "kernels/**/*.h", "kernels/**/*.cpp", "aiakq/runtime/*.py", "aiakq/runtime/[lm]*/*.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="rows 'TOOL NAME' (and 'kernels') that match this regular expression"
    )
    parser.add_argument("--fresh", action="store_true", help="discard the samples of these rows first")
    parser.add_argument("--rounds", type=int, default=2, help="processes per row")
    parser.add_argument("--no-peers", action="store_true", help="only rows of aiakq")
    parser.add_argument("--install", action="store_true", help="install other engines, and convert the model for them")
    parser.add_argument("--disturbed", action="store_true", help="accept samples taken under load, and mark them")
    parser.add_argument("--page", action="store_true", help="write the section from stored samples without measuring")
    parser.add_argument("--quiet", type=float, default=0, help="wait up to this many seconds until the machine is idle")
    args = parser.parse_args()
    args.no_peers |= os.environ.get("PEERS") == "0"
    os.chdir(ROOT)
    (OUT / "rows").mkdir(parents=True, exist_ok=True)
    if not args.page:
        measure_all(args)
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "rows": {row.slug: {**asdict(row), **kept(row, args.disturbed)} for row in contenders.rows()},
        "kernels": samples_of(KERNELS, args.disturbed),
    }
    (OUT / "results.json").write_text(json.dumps(results, indent=1))
    if any(row["samples"] for row in results["rows"].values()):
        sections.put(ROOT / "docs" / "performance.md", cpu_page.name(results), cpu_page.section(results))
    else:
        log("all samples were taken under load from other processes: the page is unchanged; --disturbed accepts them")


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_all(args: argparse.Namespace) -> None:
    """Run all rounds of the selected rows, except those that have their samples already."""
    chosen = [
        row
        for row in contenders.rows()
        if re.search(args.only, f"{row.tool} {row.name}") and (row.tool == "aiakq" or not args.no_peers)
    ]
    commands: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for row in chosen:
        found = contenders.words(row, args.install)
        if isinstance(found, str):
            log(f"{row.tool} {row.name}: {found}")
        else:
            commands[row.slug] = found
            # Samples of another version of the code or the settings do not count.
            discard_stale(row.slug, stamp_of(row), args.fresh)
    if re.search(args.only, KERNELS):
        discard_stale(KERNELS, stamp_of(None), args.fresh)
        if not samples_of(KERNELS, args.disturbed)["samples"]:
            run_sample(KERNELS, [sys.executable, str(SCRIPTS / "one_layer.py")], {}, "1 of 1", args.quiet)
    for number in range(args.rounds):
        there = [row for row in chosen if row.slug in commands]
        for row in there if number % 2 == 0 else reversed(there):
            if len(samples_of(row.slug, args.disturbed)["samples"]) <= number:
                run_sample(row.slug, *commands[row.slug], f"{number + 1} of {args.rounds}", args.quiet)


def run_sample(slug: str, command: list[str], request: dict[str, Any], which: str, patience: float) -> None:
    """Run one process and add its result to the row's file."""
    wait_until_idle(patience)
    state: dict[str, Any] = {"at": round(time.time()), "read_gbps": read_speed(), "commit": commit()}
    files = {end: OUT / "rows" / f"{slug}.{end}" for end in ("request.json", "answer.json", "log")}
    files["answer.json"].unlink(missing_ok=True)
    files["request.json"].write_text(json.dumps({"threads": threads(), **request}))
    # Every engine uses all cores by default, and some are slower with OMP_NUM_THREADS.
    variables = {name: value for name, value in environments.variables().items() if name != "OMP_NUM_THREADS"}
    words = [*command, str(files["request.json"]), str(files["answer.json"])]
    answer: dict[str, Any]
    began, before = time.monotonic(), CpuTime.now()
    try:
        with files["log"].open("w") as out:
            # Not in the root of the repository: transformers would import the folder kernels/ as the package kernels.
            subprocess.run(
                words, cwd=OUT, stdout=out, stderr=subprocess.STDOUT, env=variables, timeout=TIMEOUT, check=True
            )
        answer = json.loads(files["answer.json"].read_text())
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        late = isinstance(problem, subprocess.TimeoutExpired)
        answer = {"failed": f"not finished after {TIMEOUT} s" if late else contenders.last_word(files["log"])}
    state["busy"] = CpuTime.now().others_share(before)
    known = read(slug)
    # Replace samples that failed or were taken under load.
    known["samples"] = [*samples_of(slug, False)["samples"], {**state, **answer}]
    write(slug, known)
    outcome = answer.get("failed") or {name: round(max(values), 1) for name, values in answer.get("cells", {}).items()}
    remark = f"{time.monotonic() - began:.0f} s, read {state['read_gbps']:.1f} GB/s, others {100 * state['busy']:.0f} %"
    log(f"{slug}, {which}: {outcome} ({remark})")


def threads() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def read_speed() -> float:
    """Memory read bandwidth of all threads in GB/s: the best of several sums over a gigabyte."""
    torch.set_num_threads(threads())
    values = torch.ones(2**28)
    best = 0.0
    for _ in range(6):
        began = time.perf_counter()
        values.sum()
        best = max(best, values.nbytes / (time.perf_counter() - began) / 1e9)
    return best


# --- stored samples ------------------------------------------------------------------------------------------------


def read(slug: str) -> dict[str, Any]:
    file = OUT / "rows" / f"{slug}.json"
    return json.loads(file.read_text()) if file.is_file() else {"stamp": None, "samples": []}


def write(slug: str, known: dict[str, Any]) -> None:
    file = OUT / "rows" / f"{slug}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(known))
    partial.rename(file)


def discard_stale(slug: str, stamp: str, fresh: bool) -> None:
    """Discard samples with another stamp."""
    known = read(slug)
    samples = [] if fresh or known["stamp"] != stamp else known["samples"]
    write(slug, {"stamp": stamp, "samples": samples})


def samples_of(slug: str, disturbed: bool) -> dict[str, Any]:
    """The valid samples, or the reason why there are none."""
    found = read(slug)["samples"]
    done = [sample for sample in found if "failed" not in sample]
    kept = [sample for sample in done if disturbed or sample["busy"] < MAX_OTHERS_SHARE]
    failed = [sample["failed"] for sample in found if "failed" in sample]
    return {
        "samples": kept,
        "why_none": "measured under load" if done else failed[-1] if failed else "not measured",
    }


def stamp_of(row: Row | None) -> str:
    """A hash of everything that the samples of a row depend on; None stands for the kernels."""
    state = hashlib.sha256(json.dumps([row and asdict(row), threads()]).encode())
    script = "one_layer" if row is None else f"speed_{row.tool.replace('.', '')}"
    files = [SCRIPTS / f"{script}.py"] + ([] if row is None else [SCRIPTS / "timing.py"])
    if row is None or row.tool == "aiakq":
        files += [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    for path in files:
        state.update(path.read_bytes())
    return state.hexdigest()


def kept(row: Row, disturbed: bool) -> dict[str, Any]:
    """The samples of a row, the bytes read per token if known, and the size of its files."""
    file, folder = OUT / row.weights, OUT / "models" / row.request.get("model", "none")
    found = [file] if file.is_file() else list(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in found)
    return {**samples_of(row.slug, disturbed), "bytes": cpu_page.bytes_of(row, size), "disk": size}


def machine() -> dict[str, Any]:
    """The machine of the measurements."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    known = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "flags": [name for name in known if name in flags],
        "threads": threads(),
        "memory_gb": round(memory / 1e9),
    }


def commit() -> str:
    """The commit, with a plus if aiakq/ or kernels/ have uncommitted changes."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    changed = ["git", "status", "--porcelain", "--untracked-files=no", "--", "aiakq", "kernels"]
    name, others = (
        subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() for words in (words, changed)
    )
    return name + ("+" if others else "")


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
