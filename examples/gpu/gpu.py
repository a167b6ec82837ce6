"""All tests and measurements that need an NVIDIA GPU, in one script, without a network. Run by ``make gpu``.

Correctness first, then speed compared with other kernels and the roofline, then tuning. Every step is a process with a
time limit, so that a crash, a hang or a broken CUDA context affects one step only. ``gpu.json`` and ``gpu.md`` under
$OUT (default out/gpu) are written after every step, with a traceback for each that failed.

Runs with any Python from a bare checkout. $BUDGET is the time for all steps in seconds (default 520): a step that needs
more than the rest is not started. Arguments select steps by name. ``--rehearse`` runs as much as possible on the CPU,
with kernels in Triton's interpreter, to find errors before a GPU is used.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import gpu_checks
import gpu_engine
import gpu_families
import gpu_measure
import gpu_quantize
from gpu_checks import Machine, NeedsGpuError
from gpu_measure import OUT, Measurement
from gpu_ranks import meet, meeting_times, ranks_agree

ROOT = Path(__file__).resolve().parents[2]
#: Seconds for all steps.
BUDGET = float(os.environ.get("BUDGET", "520"))
BEGAN = time.monotonic()
#: Checks that run at the same time, each a process on its own CPU cores.
CHECKS_AT_ONCE = 8


def make_importable() -> None:
    """Make a bare checkout importable: kernels/ is the package aiakq.kernels, which normally an installation maps."""
    try:
        import aiakq.kernels  # noqa: F401
    except ModuleNotFoundError:
        tree = Path(tempfile.mkdtemp()) / "aiakq"
        tree.mkdir()
        for entry in (ROOT / "aiakq").iterdir():
            (tree / entry.name).symlink_to(entry)
        (tree / "kernels").symlink_to(ROOT / "kernels")
        for name in [name for name in sys.modules if name.split(".")[0] == "aiakq"]:
            del sys.modules[name]
        sys.path.insert(0, str(tree.parent))
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(tree.parent), *filter(None, [others])]
        )  # of processes that load a rank's share of a model


def left() -> float:
    """Return the seconds left of the budget."""
    return BUDGET - (time.monotonic() - BEGAN)


# --- running them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One process.

    limit  seconds after which it is ended.
    needs  seconds that must be left to start it.
    alone  whether it needs the GPU to itself, because it measures. Checks share the GPU.
    """

    call: Callable[[Measurement], dict]
    limit: float
    needs: float = 5
    alone: bool = True


def _check(function: Callable[[Machine], dict], limit: float, alone: bool = False) -> Step:
    return Step(lambda given: function(given.machine), limit, alone=alone)


#: Families of self_test.FAMILIES, which this process does not import.
FAMILIES = (
    "weight-only linear", "float linear", "4-bit float linear", "fp8 linear", "w8a8 linear", "norm", "activation",
    "attention", "latent attention", "convolution", "recurrence", "selective scan", "gated norm", "sampling", "LoRA",
    "experts", "GPTQ",
)  # fmt: skip
STEPS: dict[str, Step] = {
    "describe": _check(gpu_checks.describe, 60),
    **{f"kernels: {name}": _check(partial(gpu_checks.family, name), 90) for name in FAMILIES},
    "plain_kernels_agree": _check(gpu_checks.plain_kernels_agree, 90),
    "reference_matches_the_cpu": _check(gpu_checks.reference_matches_the_cpu, 60),
    "graphs_replay": _check(gpu_checks.graphs_replay, 60),
    "tokens_match_the_cpu": _check(gpu_checks.tokens_match_the_cpu, 150),
    "asynchronous_scheduling": _check(gpu_checks.asynchronous_scheduling_changes_no_token, 90),
    "draft_tokens": _check(gpu_checks.draft_tokens_change_no_answer, 90),
    "quantized_tokens": _check(gpu_checks.quantized_tokens, 90),
    **{f"engine: {name}": _check(partial(gpu_engine.engine_modes_agree, name), 150) for name in gpu_engine.FORMATS},
    **{
        f"quantize: {name}": _check(partial(gpu_quantize.quantizing_agrees, name), 150)
        for name in gpu_quantize.QUANTIZATIONS
    },
    **{
        f"families: part {part}": _check(partial(gpu_families.families_agree, part), 150)
        for part in range(gpu_families.PARTS)
    },
    "ranks_agree": _check(ranks_agree, 120, alone=True),
    "meeting_times": _check(meeting_times, 90, alone=True),
    "compiled_in_parallel": Step(gpu_measure.compiled_in_parallel, 120, 60),
    "ceilings": Step(gpu_measure.ceilings, 60),
    "product_speed": Step(gpu_measure.product_speed, 150, 30),
    "variants": Step(gpu_measure.variants, 100, 40),
    "attention_speed": Step(gpu_measure.attention_speed, 90, 20),
    "latent_speed": Step(partial(gpu_measure.layer_speed, "latents"), 60, 20),
    "recurrent_speed": Step(partial(gpu_measure.layer_speed, "recurrent"), 60, 20),
    "latent_splits": Step(partial(gpu_measure.layer_speed, "latent_splits"), 90, 30),
    "chunk_variants": Step(partial(gpu_measure.layer_speed, "chunked"), 150, 40),
    "engine_speed": Step(gpu_measure.engine_speed, 200, 60),
    "mixture_speed": Step(gpu_measure.mixture_speed, 200, 60),
    "rank_speed": Step(gpu_measure.rank_speed, 200, 60),
    "example_model_speed": Step(gpu_measure.example_model_speed, 60, 20),
    "verification_speed": Step(gpu_measure.verification_speed, 60, 20),
    "sanitized": Step(gpu_measure.sanitized, 120, 60),
    "quantize_parts": Step(gpu_quantize.quantize_parts, 90, 20),
    "quantize_speed": Step(gpu_quantize.quantize_speed, 60, 20),
    "tuning": Step(gpu_measure.tuning, 300, 120),
}


def run_step(name: str, machine: Machine, measured: dict[str, float]) -> dict:
    """Run one step in a new process and return its result, or ``failed`` with the traceback."""
    step = STEPS[name]
    if left() < step.needs:
        return {"not begun": f"{left():.0f} s are left"}
    limit = min(step.limit, left())
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder, "result.json"), Path(folder, "said")
        words = ["--step", name, "--device", machine.device, "--limit", f"{limit:.0f}", "--result", str(result)]
        environment = os.environ | {"AIAKQ_GPU_CEILINGS": json.dumps(measured)}
        if machine.rehearsed:
            environment["TRITON_INTERPRET"] = "1"
        elif not step.alone:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // CHECKS_AT_ONCE))
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, *words],
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = json.loads(result.read_text()) if result.exists() else {}
        if code == 0:
            return found
        end = said.read_text(errors="replace")[-4000:]
        reason = f"ended after {limit:.0f} s" if code is None else f"exit status {code}"
        return found | {"failed": found.get("failed") or f"{end}\n{reason}"}


def child(name: str, machine: Machine, limit: float, result: Path) -> int:
    """Run one step in this process and write what it returns."""
    began = time.monotonic()

    def save(found: dict) -> None:
        partial_file = result.with_suffix(".part")
        partial_file.write_text(json.dumps(found))
        partial_file.replace(result)

    measured = json.loads(os.environ.get("AIAKQ_GPU_CEILINGS", "{}"))
    given = Measurement(machine, measured, lambda: limit - (time.monotonic() - began), save)
    kept = json.loads(result.read_text()) if result.exists() else {}
    try:
        save(STEPS[name].call(given))
    except NeedsGpuError as reason:
        save({"not begun": str(reason) or "it needs a GPU"})
    except Exception:
        kept = json.loads(result.read_text()) if result.exists() else {}
        save(kept | {"failed": traceback.format_exc()})
        return 1
    return 0


def state_of(found: dict) -> str:
    """done, failed or not begun."""
    return "failed" if "failed" in found else "not begun" if "not begun" in found else "done"


def markdown(results: dict[str, dict]) -> str:
    """Return the measurements as tables with rooflines, and failed or skipped steps as lines."""
    lines = ["# make gpu", "", *(f"- {key}: {value}" for key, value in results.get("describe", {}).items())]
    lines += [f"- at most, {key}: {_cell(value)}" for key, value in results.get("ceilings", {}).items()]
    for title, found in results.items():
        if title in ("describe", "ceilings"):
            continue
        lines += ["", f"## {title}: {state_of(found)}"]
        if "failed" in found:
            lines += ["", *(f"    {line}" for line in found["failed"].strip().splitlines()[-12:])]
        rows = found.get("rows") or []
        if rows:
            lines += ["", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
            lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
        times = found.get("times") or {}
        if times:
            columns = sorted({m for each in times.values() for m in each}, key=int)
            lines += ["", "| times as fast, at rows | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
            for name, each in times.items():
                cells = (f"{each[m]:.2f}" if m in each else "" for m in columns)
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines += [f"- {name}: {note}" for name, note in (found.get("notes") or {}).items()]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def report(results: dict[str, dict]) -> None:
    """Write both files."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "gpu.json").write_text(json.dumps(results, indent=1))
    (OUT / "gpu.md").write_text(markdown(results))


def _ran(machine: Machine, names: list[str], results: dict[str, dict]) -> Iterator[tuple[str, dict, float]]:
    """Run steps of these names in order, checks that follow each other at once; yield name, result and seconds.

    results  those that were yielded.
    """

    def timed(name: str) -> tuple[str, dict, float]:
        began = time.monotonic()
        measured = {key: value for key, value in results.get("ceilings", {}).items() if isinstance(value, float)}
        found = run_step(name, machine, measured)
        return name, found, time.monotonic() - began

    for alone, group in groupby(names, lambda name: STEPS[name].alone):
        if alone or machine.rehearsed:
            yield from map(timed, group)
        else:
            with ThreadPoolExecutor(min(CHECKS_AT_ONCE, os.cpu_count() or 1)) as pool:
                yield from pool.map(timed, group)


def run_all(machine: Machine, names: list[str]) -> int:
    """Run the steps of these names, all if there are none; the exit status is 1 if one failed."""
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        sys.stderr.write(f"make gpu: no step {unknown[0]!r}; there are {', '.join(STEPS)}.\n")
        return 2
    results: dict[str, dict] = {}
    for name, found, took in _ran(machine, names or list(STEPS), results):
        results[name] = found
        report(results)
        sys.stderr.write(f"{name}, {took:.0f} s, {state_of(found)}: {json.dumps(found)[:2000]}\n")
    return 1 if any("failed" in found for found in results.values()) else 0


def main(words: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Check and measure aiakq on an NVIDIA GPU.")
    parser.add_argument("steps", nargs="*", help="names of steps; all if none is given")
    parser.add_argument("--rehearse", action="store_true", help="run what can be run on the CPU")
    for name in ("--step", "--device", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--meet", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--warm", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    make_importable()
    if given.meet:
        meet(given.meet[0], int(given.meet[1]), 1)
        return 0
    if given.step:
        return child(given.step, Machine(given.device), given.limit, Path(given.result))
    if given.rehearse:
        return run_all(Machine("cpu"), given.steps)
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("make gpu: torch finds no NVIDIA GPU here; nothing was checked.\n")
        return 7
    if given.small:
        gpu_checks.small_problems(Machine("cuda"))
        return 0
    if given.warm:
        gpu_measure.warm(*given.warm)
        return 0
    return run_all(Machine("cuda"), given.steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
