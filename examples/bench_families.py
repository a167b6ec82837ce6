"""Measure shapes of newer families on the CPU beside other engines, and write a section of docs/performance.md.

    python examples/bench_families.py [--only WORDS] [--rounds N] [--section NAME] [--install]

Every engine that is installed runs in a process of its own, one after the other, in rounds of alternating order, on the
same folder of about a billion random parameters in bfloat16 (examples/cpu_peers/family_shapes.py).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / "cpu_peers"), str(ROOT / "examples" / "peers"), str(ROOT / "examples")]

import bench_cpu  # noqa: E402
import contenders  # noqa: E402
import family_shapes  # noqa: E402
import sections  # noqa: E402
from contenders import OUT, SCRIPTS  # noqa: E402

TOOLS = ("aiakq", "transformers", "vllm", "llama.cpp")
CELLS = {"decode": "decode", "batch": "decode, batch 16", "prefill": "prompt of 512"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="'SHAPE TOOL' that match this regular expression")
    parser.add_argument("--rounds", type=int, default=1, help="processes per engine and shape")
    parser.add_argument("--section", default="families", help="section of the page, one for each kind of machine")
    parser.add_argument("--install", action="store_true", help="install vLLM and build llama.cpp")
    args = parser.parse_args()
    os.chdir(ROOT)
    (OUT / "rows").mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str], list[dict[str, Any]] | str] = {}
    for shape in family_shapes.SHAPES:
        commands: dict[str, tuple[list[str], dict[str, Any]]] = {}
        reasons: dict[str, str] = {}
        for tool in TOOLS:
            if not re.search(args.only, f"{shape} {tool}"):
                continue  # keep earlier measurements
            known = command(shape, tool, args.install)
            if isinstance(known, str):
                reasons[tool] = known
            else:
                commands[tool] = known
                bench_cpu.discard_stale(slug(shape, tool), "", fresh=True)
        for number in range(args.rounds):
            for tool in list(commands) if number % 2 == 0 else reversed(commands):
                bench_cpu.run_sample(slug(shape, tool), *commands[tool], f"{number + 1} of {args.rounds}", 0)
        for tool in TOOLS:
            samples = bench_cpu.samples_of(slug(shape, tool), disturbed=True)
            found[shape, tool] = reasons.get(tool) or samples["samples"] or samples["why_none"]
    sections.put(ROOT / "docs" / "performance.md", args.section, page(found))


def slug(shape: str, tool: str) -> str:
    """The name of a row's files."""
    return f"family-{family_shapes.slug(shape)}-{tool.replace('.', '')}"


def command(shape: str, tool: str, install: bool) -> tuple[list[str], dict[str, Any]] | str:
    """Return the command of a tool's script and its request, or one sentence on why it cannot run."""
    model, python = family_shapes.folder(shape, OUT / "models"), Path(sys.executable)
    request: dict[str, Any] = {"model": str(model), "dtype": "bfloat16"}
    if tool == "aiakq":
        request["arguments"] = {"dtype": "bfloat16"}
    elif tool == "vllm":
        place = contenders.python_of(tool, install)
        if isinstance(place, str):
            return place
        python = place
    elif tool == "llama.cpp":
        converted = gguf(shape, model, install)
        if isinstance(converted, str):
            return converted
        request |= converted
    return [str(python), str(SCRIPTS / f"speed_{tool.replace('.', '')}.py")], request


def gguf(shape: str, model: Path, install: bool) -> dict[str, Any] | str:
    """The request of llama.cpp: its programs, and the model converted by its own program."""
    programs, source = contenders.LLAMA / "build" / "bin", contenders.llama_source()
    if source is None or not (programs / contenders.PROGRAMS[0]).is_file():
        failed = contenders.build_llama() if install else "not built; --install does that"
        if failed:
            return failed
        source = contenders.llama_source()
    assert source is not None
    file = OUT / "gguf" / f"{family_shapes.slug(shape)}.gguf"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        partial = file.with_suffix(".partial")
        words = [sys.executable, str(SCRIPTS / "family_shapes.py"), str(source), str(model), str(partial)]
        failed = contenders.logged(words, file.with_suffix(".log"))
        if failed:
            return f"not converted: {failed}"
        partial.rename(file)
    version = source.parents[1].name.removeprefix("llama_cpp_python-")
    return {"model": str(file), "programs": str(programs), "version": version}


def page(found: dict[tuple[str, str], list[dict[str, Any]] | str]) -> str:
    """The section of docs/performance.md, with the shapes of which anything was measured."""
    machine = bench_cpu.machine()
    intro = (
        f"Written by `python examples/bench_families.py` at {bench_cpu.commit()} on {machine['cpu']} "
        f"({', '.join(machine['flags'])}), {machine['threads']} threads: tokens per second, medians, "
        "bfloat16 weights of random numbers in each shape. In brackets: how many times the best of the others."
    )
    lines = [
        f"## Other architectures, with {machine['flags'][-1]}",
        "",
        textwrap.fill(intro, 130),
        "",
        f"| shape | engine | {' | '.join(CELLS.values())} |",
        f"|---|---|{'---|' * len(CELLS)}",
    ]
    measured = {shape for (shape, _), samples in found.items() if not isinstance(samples, str)}
    for shape in filter(measured.__contains__, family_shapes.SHAPES):
        speeds = {
            tool: {cell: statistics.median([x for sample in samples for x in sample["cells"][cell]]) for cell in CELLS}
            for tool in TOOLS
            if not isinstance(samples := found[shape, tool], str)
        }
        for tool in TOOLS:
            samples = found[shape, tool]
            if isinstance(samples, str):
                lines.append(f"| {shape} | {tool} | {samples} {'| ' * len(CELLS)}|")
                continue
            cells = []
            for cell in CELLS:
                others = [speeds[other][cell] for other in speeds if other != "aiakq"]
                times = f" ({speeds[tool][cell] / max(others):.2f} x)" if tool == "aiakq" and others else ""
                cells.append(f"{speeds[tool][cell]:.1f}{times}")
            lines.append(f"| {shape} | {tool} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
