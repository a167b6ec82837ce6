"""Read the rows of an earlier docs/quality.md into the store, for results whose values per window are lost.

    git show COMMIT:docs/quality.md | python examples/peers/published.py COMMIT

Cells are kept as they are, with the commit of their page. Rows that are in the store already stay.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "examples" / "training")]

import store  # noqa: E402
from quality_page import TITLES  # noqa: E402
from rows import ROWS  # noqa: E402
from subjects import SEEDS  # noqa: E402

Result = dict[str, Any]
Cells = dict[str, str]
SLUGS = {(row.kind, row.tool, row.name): row.slug for row in ROWS}
MODELS = {title: key for key, title in TITLES.items()}
#: A processor that is not known, of aiakq's default and of rows with an asterisk.
MACHINES = {"": "published", "*": "published, another"}


def main() -> None:
    (commit,) = sys.argv[1:]
    read_into(store.Store(), sys.stdin.read(), commit)


def read_into(kept: store.Store, page: str, commit: str) -> None:
    """Store the rows of a page that are not in the store, and what its first and last tables say."""
    for model, rows in model_rows(page, commit).items():
        kept.replace(model, rows)
    last = page.rstrip().splitlines()[-1]
    ours = re.search(r"Rows of aiakq at commit ([^;]*);", last)
    packages = re.findall(r"([\w-]+) (\d[\w.+]*)", last.partition(";")[2])
    document = {
        "commit": commit,
        "ours": ours[1] if ours else "",
        "versions": dict(packages),
        "pairs": pairs(page),
    }
    kept.write(store.PUBLISHED, document)
    measured = re.search(r"Measured at commit (.*)\.\n", page)
    lines = [line for line in section(page, "## Loading in other engines") if line.startswith("|")]
    if measured and lines and kept.read(store.ELSEWHERE) is None:
        kept.write(store.ELSEWHERE, {"published": lines, "commit": measured[1]})


def model_rows(page: str, commit: str) -> dict[str, dict[str, dict[str, Result]]]:
    """The rows of a page: model -> sampling -> slug -> row."""
    found: dict[str, dict[str, dict[str, Result]]] = {}
    first, second = SEEDS
    for title, model in MODELS.items():
        lines = section(page, f"## {title}")
        unquantized = re.search(r"Unquantized: perplexity ([0-9.]+) on ([0-9]+) predicted tokens", "\n".join(lines))
        common: Result = {"published": commit}
        if unquantized:
            common |= {"original": unquantized[1], "tokens": int(unquantized[2])}
        for kind, cells in tables(lines):
            slug = SLUGS.get((kind, cells["tool"], cells["settings"]))
            if slug is None:
                continue
            rows = found.setdefault(model, {first: {}, second: {}})
            known = rows[first].setdefault(slug, dict(common))
            if "99 %" in cells:
                known["fidelity"] = without(cells, "tool", "settings")
            elif cells["MB"]:
                known |= figures_of(cells)
                if cells["other sampling"]:
                    rows[second][slug] = {**common, "cells": {"KL": cells["other sampling"]}}
            else:
                known["failed"] = cells["perplexity"]
    return found


def figures_of(cells: Cells) -> Result:
    """What a row of the first table of a kind says, in the units of results."""
    star = "*" if cells["CPU s"].endswith("*") else ""
    return {
        "bytes": float(cells["MB"]) * 1e6,
        "processor_seconds": float(cells["CPU s"].rstrip("*")),
        "seconds": float(cells["s"].rstrip("*")),
        "peak_memory": float(cells["peak MB"]) * 1e6,
        "machine": MACHINES[star],
        "cells": {name: cells[name] for name in ("perplexity", "change", "against ours", "KL", "top-1 agreement")},
    }


def pairs(page: str) -> dict[str, Result]:
    """Ratios and intervals of the table of defaults and best others, by model and kind.

    ``kl`` are the divergences that they belong to, ``sure`` is whether the interval excludes no difference.
    """
    verdicts = {}
    for title in MODELS:
        for kind, cells in tables(section(page, f"## {title}")):
            verdicts[title, kind, f"{cells['tool']}, {cells['settings']}"] = cells.get("against ours", "")
    found = {}
    for _, cells in tables(section(page, "## In short")):
        other = verdicts.get((cells["model"], cells["kind"], cells["best other tool"]), "")
        found[f"{MODELS[cells['model']]}, {cells['kind']}"] = {
            "kl": [cells["KL"], cells["its KL"]],
            "ratio": cells["ratio"],
            "perplexity": cells["perplexity"],
            "sure": other.endswith("worse") or other.endswith("better"),
        }
    return found


def section(page: str, title: str) -> list[str]:
    """The lines below a heading of the second level."""
    lines = page.splitlines()
    if title not in lines:
        return []
    start = lines.index(title) + 1
    end = next((at for at in range(start, len(lines)) if lines[at].startswith("## ")), len(lines))
    return lines[start:end]


def tables(lines: list[str]) -> Iterator[tuple[str, Cells]]:
    """The rows of all tables, each with the heading of the third level before it, without marks of Markdown."""
    kind, head = "", None
    for line in lines:
        if line.startswith("### "):
            kind = line[4:]
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = split(line)
        elif not line.startswith("|---"):
            yield kind, dict(zip(head, split(line), strict=False))


def split(line: str) -> list[str]:
    return [
        cell.strip().strip("*") if cell.strip().startswith("**") else cell.strip() for cell in line[1:-1].split("|")
    ]


def without(cells: Cells, *names: str) -> Cells:
    return {name: cell for name, cell in cells.items() if name not in names}


if __name__ == "__main__":
    main()
