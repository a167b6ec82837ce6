"""docs/quality.md from what examples/quality.py measured."""

from __future__ import annotations

import math
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from neighbours import NOISY
from rows import Row

Result = dict[str, Any]
WINDOW = 512

TITLES = {
    "books": "The example model",
    "outliers": "A larger model with outlier channels",
    "books-outliers": "The example model with outliers planted",
}
ABOUT = {
    "books": """\
`examples/tinybooks`, a Llama of 5.8 M parameters in bf16, on `examples/heldout.txt`, a book it never saw. Calibrated
on the samples that `aiakq quantize` picks from the bundled text.""",
    "outliers": """\
`examples/outliers.py random`: a Llama of 57 M parameters with random weights, on text sampled from itself; without any
one of its 16 sublayers its perplexity grows by 5 to 50 %. In every block two channels of the residual stream are 32 or
64 times as large as the rest after each norm, one channel of the values and two of the MLP as well; the columns that
read them are as much smaller, so the function is that of the model without outliers. A tool that smooths only what
follows a norm leaves the outliers of the attention output and of the down projection where they are.""",
    "books-outliers": """\
`examples/outliers.py books`: the same function and the same text as the example model, outliers planted as above: what
the next rows lose against the first table, they lose to outliers.""",
}
HEAD = """\
Written by `make quality`, which makes a virtual environment for every other tool and gives all of them the same
calibration ids, bits and groups: 128 samples of 512 tokens, for the larger model 16. Every checkpoint, ours and theirs,
is scored by our runtime in float32 on the same windows of 512 tokens.

- *change*: perplexity against the unquantized model; *against ours*: against the row in bold, our default for the kind.
  Both with their standard error over windows: a difference of less than twice that is chance.
- *KL*: from the unquantized model, nats per token; it moves far less by chance than perplexity. *same top*: how often
  the most likely token is the original's.
- *s*: loading, calibration, quantizing and writing, without imports, on {threads} threads (~: others used the machine
  meanwhile); *peak MB*: the most memory that process ever had resident, with Python, torch and the tool itself.
"""
ELSEWHERE = """\
Our four default outputs of the example model, read by other engines: 16 prompts of 24 tokens, 32 greedy tokens each.
Ours computes in float32, with `--cpu-math exact`. *log p differs*: between what the engine and ours say of the engine's
tokens; *its own rounding* is the same number for the unquantized model in that engine and dtype; *closest call* is how
much more likely our runtime's token was where tokens first part, at most. transformers reads `gptq` and `awq` through
gptqmodel's plain torch kernels: the ones it would choose for a CPU compute in bf16. vLLM's CPU build has no kernel for
8-bit weight-only checkpoints and takes `gptq` and `awq` in 16 bits only.

In w8a8 every activation is rounded to 8 bits. The last bit of a sum decides which of two neighbouring codes it becomes;
transformers also takes a scale of absmax / 127.5 per token where ours is absmax / 127 (with its scale, our logits are
half as far from its). Through the layers the difference grows until it is as large as the noise of that rounding, and
tokens part where the two most likely ones are as close as that. *Quantizing* is what the checkpoint itself differs from
the unquantized model by, for comparison.
"""


def page(rows: list[Row], results: list[Result], elsewhere: list[str], root: Path) -> str:
    """The whole page. ``results`` are all that were ever measured; those of rows that are gone are left out."""
    by_model: dict[str, dict[str, Result]] = {}
    for result in results:
        by_model.setdefault(result["model"], {})[result["slug"]] = result
    parts = ["# Quality", "", HEAD.format(threads=torch.get_num_threads())]
    behind: list[str] = []
    for key, title in TITLES.items():
        if key not in by_model:
            continue
        parts += [f"## {title}" if parts[-1].endswith("\n") else f"\n## {title}", "", ABOUT[key]]
        parts += ["", *unquantized(by_model[key])]
        parts += outlier_claim(by_model[key], rows)
        for kind in dict.fromkeys(row.kind for row in rows if key in row.models):
            mine = [row for row in rows if row.kind == kind and key in row.models and row.slug in by_model[key]]
            if mine:
                parts += ["", f"### {kind}", "", *table(mine, by_model[key])]
                behind += remarks(mine, by_model[key], title)
    parts += ["", "## Where another tool is ahead", ""]
    parts += (
        [BEHIND, "", *behind] if behind else ["Nowhere: no row is better, faster or smaller than ours of its kind."]
    )
    if elsewhere[2:]:
        parts += ["", "## Loads elsewhere", "", ELSEWHERE, *elsewhere]
    parts += ["", machine(by_model, root)]
    return "\n".join(parts) + "\n"


BEHIND = (
    "Rows that are better than our default of their kind by more than 0.1 % in perplexity, or better in KL, or in time."
)


def unquantized(found: dict[str, Result]) -> list[str]:
    """What the model is before anything is done to it."""
    result = next((result for result in found.values() if "loss" in result), None)
    if result is None:
        return []
    tokens = (WINDOW - 1) * len(result["loss"])
    return [f"Unquantized: perplexity {math.exp(mean(result['loss_original'])):.3f} on {tokens} predicted tokens."]


def default_of(rows: list[Row], found: dict[str, Result]) -> Row | None:
    """Our row that the others of the kind are held against: the first that does more than round."""
    ours = [row for row in rows if row.tool == "aiakq" and "failed" not in found[row.slug]]
    return next((row for row in ours if not row.request.get("plain")), None)


def table(rows: list[Row], found: dict[str, Result]) -> list[str]:
    default = default_of(rows, found)
    lines = [
        "| tool | settings | MB | perplexity | change | against ours | KL | same top | s | peak MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        result = found[row.slug]
        name = f"**{row.name}**" if row is default else row.name
        if "failed" in result:
            lines.append(f"| {row.tool} | {name} | | {result['failed'].replace('|', '/')} | | | | | | |")
            continue
        change = percent(result["loss"], result["loss_original"])
        against = percent(result["loss"], found[default.slug]["loss"]) if default and row is not default else ""
        lines.append(
            f"| {row.tool} | {name} | {result['bytes'] / 1e6:.1f} | {math.exp(mean(result['loss'])):.3f} | {change} | "
            f"{against} | {mean(result['kl']):.5f} | {100 * mean(result['same']):.1f} % | "
            f"{disturbed(result)}{result['seconds']:.0f} | {result['peak_memory'] / 1e6:.0f} |"
        )
    return lines


def disturbed(result: Result) -> str:
    """A mark for seconds that others had a part in."""
    return "~" if result.get("busy", 1) >= NOISY else ""


def remarks(rows: list[Row], found: dict[str, Result], title: str) -> list[str]:
    """What speaks for the other tools' rows of a kind, one line each."""
    default = default_of(rows, found)
    if default is None:
        return []
    ours, lines = found[default.slug], []
    for row in rows:
        theirs = found[row.slug]
        if row.tool == "aiakq" or "failed" in theirs:
            continue
        better = []
        if mean(ours["loss"]) - mean(theirs["loss"]) > 0.001:
            better.append(f"perplexity {percent(theirs['loss'], ours['loss'])}")
        if mean(theirs["kl"]) < mean(ours["kl"]):
            better.append(f"KL {mean(theirs['kl']):.5f} against {mean(ours['kl']):.5f}")
        if theirs["seconds"] < ours["seconds"]:
            better.append(f"{theirs['seconds']:.1f} s against {ours['seconds']:.1f} s")
        if theirs["peak_memory"] < ours["peak_memory"]:
            better.append(f"{theirs['peak_memory'] / 1e6:.0f} MB of memory against {ours['peak_memory'] / 1e6:.0f} MB")
        if better:
            lines.append(f"- {title}, {row.kind}: {row.tool}, {row.name}: {'; '.join(better)}.")
    return lines


def outlier_claim(found: dict[str, Result], rows: list[Row]) -> list[str]:
    """What smoothing is for, in one sentence."""
    eight = {row.name: found.get(row.slug, {}) for row in rows if row.tool == "aiakq" and "and activations" in row.kind}
    plain, smooth = eight.get("plain rounding", {}), eight.get("smooth_quant", {})
    if "loss" not in plain or "loss" not in smooth:
        return []
    one, other = (percent(result["loss"], result["loss_original"]) for result in (plain, smooth))
    return [
        "",
        f"8-bit weights and activations: plain rounding changes perplexity by {one}, `smooth_quant` by {other}.",
    ]


def percent(loss: list[float], reference: list[float]) -> str:
    """How much larger perplexity is, in percent, with the standard error of the paired difference."""
    gaps = [a - b for a, b in zip(loss, reference, strict=True)]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return f"{100 * math.expm1(mean(gaps)):+.2f} ± {100 * error:.2f} %"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def machine(by_model: dict[str, dict[str, Result]], root: Path) -> str:
    versions: dict[str, str] = {}
    for found in by_model.values():
        for result in found.values():
            versions |= {
                name: version for name, version in result.get("versions", {}).items() if name != "transformers"
            }
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    tools = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return f"Commit {commit.stdout.strip()}; {tools}; {torch.get_num_threads()} threads, {platform.machine()}."
