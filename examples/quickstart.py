"""The whole workflow on the example model: quantize, serve, query, benchmark, compare. Run by ``make quickstart``.

Every command is printed before it runs. Results are written to out/quickstart.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from aiakq.server.background import start_in_background
from aiakq.terminal import console as terminal

ROOT = Path(__file__).resolve().parent.parent
MODEL = "examples/tinybooks"
TEXT = "examples/heldout.txt"
OUT = Path(os.environ.get("OUT", "out/quickstart"))
METHODS = ("gptq", "awq", "smooth_quant", "weight_only_int8")

console = Console(stderr=True)


def main() -> None:
    os.chdir(ROOT)
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    first, *others = METHODS
    console.print("Every command is shown before it runs. Perplexity is measured last.", style="dim")
    console.print("All of it takes about three minutes on two idle cores, the first answer half a minute.", style="dim")
    console.print(Rule(f"1. Quantize the example model with {first}, and ask it"))
    quantize(first)
    command("aiakq", "serve", "--model", str(OUT / first), "-q", first, "--port", "0")
    with start_in_background(
        {"model": str(OUT / first), "quantization": first, "served_model_name": ["tiny"]}
    ) as server:
        console.print(f"ready at {server.url}, with a playground for browsers")
        query(server.url, began)
        console.print(Rule("2. Benchmark the server"))
        aiakq(
            "bench", "serve", "--base-url", server.url, "--num-prompts", "48", "--max-concurrency", "8",
            "--input-len", "64", "--output-len", "32", "--output", str(OUT / "bench.json"),
        )  # fmt: skip
    console.print(Rule("3. Quantize it with the other methods"))
    for method in others:
        quantize(method)
    console.print(Rule("4. Compare them with the original, on a book that it was not trained on"))
    show_quality([compare(method) for method in METHODS])
    console.print(Rule(f"Done in {time.monotonic() - began:.0f} s. Results: {OUT}"))


def quantize(method: str) -> None:
    """Write the checkpoint of one method."""
    aiakq(
        "quantize", "-i", MODEL, "-o", str(OUT / method), "-quant_type", method, "-tp", "1", "-t", "bf16",
        "--overwrite", "--no-eval",
    )  # fmt: skip


def command(*words: str) -> None:
    """Print a command as it is typed in a shell, broken between words where it is wider than the screen."""
    rows = textwrap.wrap(shlex.join(words), console.width - 8, break_long_words=False, break_on_hyphens=False)
    text = " \\\n      ".join(rows)
    console.print(f"\n$ {text}", style="bold", soft_wrap=True, highlight=False, markup=False)


def aiakq(*words: str) -> str:
    """Print and run one aiakq command; returns what it wrote to standard output."""
    command("aiakq", *words)
    program = Path(sys.executable).with_name("aiakq")
    done = subprocess.run([str(program), *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def compare(method: str) -> dict:
    """The result of ``aiakq eval`` of one checkpoint against the original."""
    folder = OUT / method
    result = json.loads(aiakq("eval", str(folder), "--original", MODEL, "--text", TEXT, "--limit", "16384", "--json"))
    report = json.loads((folder / "aiakq_report.json").read_text())
    return {"method": method, "report": report, "eval": result}


def show_quality(rows: list[dict]) -> None:
    """One table of all methods."""
    table = terminal.table(
        "method", "scheme", "bits", "MB", "perplexity", "change", "KL", "top-1\nagreement", left=(0, 1)
    )
    original = rows[0]["eval"]["perplexity_original"]
    before = rows[0]["report"]["bytes_before"]
    table.add_row("original", "w16", "16.00", f"{before / 1e6:.1f}", f"{original:.3f}", "", "", "")
    for row in rows:
        report, result = row["report"], row["eval"]
        table.add_row(
            row["method"],
            report["scheme"],
            f"{report['bits_per_weight']:.2f}",
            f"{report['bytes_after'] / 1e6:.1f}",
            f"{result['perplexity']:.3f}",
            f"{100 * (result['perplexity'] / original - 1):+.2f}%",
            f"{result['kl']:.4f}",
            f"{100 * result['top1_agreement']:.1f}%",
        )
    terminal.show(table)


def query(url: str, began: float) -> None:
    """A completion, a chat answer and a stream, through the openai client. ``began``: when all of this did."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    prompt = "It was a dark night , and the old man"
    done = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
    show("completion", prompt, done.choices[0].text)
    console.print(f"The first answer, {time.monotonic() - began:.0f} s after the installation.", style="dim")
    messages = [{"role": "user", "content": "Tell me about the sea ."}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, temperature=0)
    show("chat", "", answer.choices[0].message.content or "")
    console.print("stream      Alice was", end="", highlight=False)
    stream = client.completions.create(model="tiny", prompt="Alice was", max_tokens=12, temperature=0, stream=True)
    for chunk in stream:
        console.print(chunk.choices[0].text, end="", style="bold", soft_wrap=True, highlight=False)
    console.print()


def show(kind: str, prompt: str, answer: str) -> None:
    """Print a prompt and its output on one or two lines."""
    text = Text.assemble(f"{kind:12}", prompt, (" ".join(["", *answer.split()] if prompt else answer.split()), "bold"))
    console.print(text)


if __name__ == "__main__":
    main()
