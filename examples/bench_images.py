"""Measure the first token of an image on the CPU beside llama.cpp, and write a section of docs/performance.md.

    python examples/bench_images.py [--rounds N] [--install]

The model has the shape of SmolVLM-500M with random weights in bfloat16 (examples/cpu_peers/vision_shape.py). Both
engines read the same image files, in turns; the time runs from the request to the first token, after a warm-up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / "cpu_peers"), str(ROOT / "examples" / "peers"), str(ROOT / "examples")]

import bench_cpu  # noqa: E402
import contenders  # noqa: E402
import sections  # noqa: E402
import vision_shape  # noqa: E402
from contenders import OUT, SCRIPTS  # noqa: E402

PIXELS, TEXT = 448, "Describe this picture in a few words."
#: Longest edge to which images are enlarged -> what that means.
SIZES = {1024: "4 tiles and the whole"}
TOOLS = ("aiakq", "llama.cpp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="processes per engine and size")
    parser.add_argument("--images", type=int, default=2, help="images per process, in addition to the warm-up")
    parser.add_argument("--install", action="store_true", help="build llama.cpp")
    args = parser.parse_args()
    os.chdir(ROOT)
    (OUT / "rows").mkdir(parents=True, exist_ok=True)
    failed = contenders.build_llama() if args.install else None
    if failed:
        raise SystemExit(f"llama.cpp: {failed}")
    found: dict[tuple[int, str], list[dict[str, Any]] | str] = {}
    for size in SIZES:
        requests = {tool: request(size, tool, args.images + 1) for tool in TOOLS}
        for tool in TOOLS:
            bench_cpu.discard_stale(slug(size, tool), "", fresh=True)
        for number in range(args.rounds):
            for tool in TOOLS if number % 2 == 0 else reversed(TOOLS):
                words = [sys.executable, str(SCRIPTS / f"image_{tool.replace('.', '')}.py")]
                bench_cpu.run_sample(slug(size, tool), words, requests[tool], f"{number + 1} of {args.rounds}", 0)
        for tool in TOOLS:
            samples = bench_cpu.samples_of(slug(size, tool), disturbed=True)
            found[size, tool] = samples["samples"] or samples["why_none"]
    sections.put(ROOT / "docs" / "performance.md", "images", page(found))


def slug(size: int, tool: str) -> str:
    """The name of a row's files."""
    return f"image-{size}-{tool.replace('.', '')}"


def request(size: int, tool: str, images: int) -> dict[str, Any]:
    """The request of a tool's script."""
    model = vision_shape.folder(size, OUT / "models")
    asked: dict[str, Any] = {"model": str(model), "images": pictures(images), "text": TEXT}
    if tool == "llama.cpp":
        files = {"model": OUT / "gguf" / f"{model.name}.gguf", "encoder": OUT / "gguf" / f"mmproj-{model.name}.gguf"}
        for name, file in files.items():
            convert(model, file, ["--mmproj"] if name == "encoder" else [])
        asked |= {name: str(file) for name, file in files.items()}
        asked["programs"] = str(contenders.LLAMA / "build" / "bin")
    return asked


def convert(model: Path, file: Path, more: list[str]) -> None:
    """Write a GGUF file with llama.cpp's program if it does not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file():
        return
    partial = file.with_name(f"partial-{file.name}")
    script = [sys.executable, str(SCRIPTS / "vision_shape.py"), str(contenders.llama_source()), str(model)]
    failed = contenders.logged([*script, str(partial), *more], file.with_suffix(".log"))
    if failed:
        raise SystemExit(f"{file.name}: {failed}")
    written = next(found for found in file.parent.glob(f"*partial-{file.name}"))
    written.rename(file)


def pictures(count: int) -> list[str]:
    """Files of different random pictures."""
    import numpy
    from PIL import Image

    files = []
    for number in range(count):
        file = OUT / "images" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse = numpy.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
        Image.fromarray(coarse).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC).save(file)
        files.append(str(file))
    return files


def page(found: dict[tuple[int, str], list[dict[str, Any]] | str]) -> str:
    """The section of docs/performance.md."""
    intro = (
        f"Written by `python examples/bench_images.py` at {bench_cpu.commit()} on {bench_cpu.machine()['cpu']}, "
        f"{bench_cpu.threads()} threads: seconds from a chat with a picture of {PIXELS} x {PIXELS} pixels to the first "
        "token, medians. A model of the shape of SmolVLM-500M with random weights in bfloat16; llama.cpp's "
        "`llama-mtmd-cli` with an encoder in float16. In brackets: the ratio of llama.cpp's time to ours."
    )
    lines = ["## The first token of an image", "", textwrap.fill(intro, 130), ""]
    lines += ["| the picture is read as | engine | seconds |", "|---|---|---|"]
    for size, meaning in SIZES.items():
        medians: dict[str, float] = {}
        for tool in TOOLS:
            samples = found[size, tool]
            if isinstance(samples, str):
                lines.append(f"| {meaning} | {tool} | {samples} |")
                continue
            medians[tool] = statistics.median([x for sample in samples for x in sample["first_token"]])
        for tool, seconds in medians.items():
            ratio = f" ({medians['llama.cpp'] / seconds:.2f} x)" if tool == "aiakq" and "llama.cpp" in medians else ""
            lines.append(f"| {meaning} | {tool} | {seconds:.2f}{ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
