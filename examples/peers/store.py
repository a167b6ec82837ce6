"""The measured rows of docs/quality.md, kept in the repository: one file for each model, in examples/peers/results.

A row holds what the page is made of: means of every window and block with 5 significant digits (6 for the loss), so
that differences can still be paired, what is not a mean with its interval, cost, versions, and the key that says
whether it is up to date (``jobs.Job.differences``). Files are sorted and have one line per field, so that their changes
can be reviewed.

Rows with ``published`` are from a page whose values per window are lost (``published.py``); they are replaced when they
are measured again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subjects import SEEDS

Result = dict[str, Any]
FOLDER = Path(__file__).resolve().parent / "results"
#: What does not belong to one model: where published rows are from, and how other engines load our checkpoints.
PUBLISHED, ELSEWHERE = "published.json", "elsewhere.json"
#: Hexadecimal digits of hashes.
DIGITS = 16
#: Significant digits of each list of means; perplexity is shown with more digits than the rest.
PRECISION = {"loss": 6, "loss_original": 6}


class Store:
    """The rows in a folder. Several runs may write at once: every change reads and replaces a file under a lock."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder

    def row(self, model: str, sampling: str, slug: str) -> Result:
        """The stored row, or an empty one."""
        return self._read(model)["rows"].get(sampling, {}).get(slug, {})

    def keep(self, result: Result) -> None:
        """Store a scored or failed result of ``jobs.Job``. A tool that cannot be installed replaces no figures."""
        model, sampling, slug = (result[name] for name in ("model", "sampling", "slug"))
        row = compact(result)
        with self._locked():
            content = self._read(model)
            rows = content["rows"].setdefault(sampling, {})
            if slug in rows and result.get("failed", "").startswith("not installed"):
                return
            if "loss_original" in result:
                content["originals"][row["key"]["model"]] = _rounded("loss_original", result["loss_original"])
            rows[slug] = row
            self._write(f"{model}.json", content)

    def replace(self, model: str, rows: dict[str, dict[str, Result]]) -> None:
        """Store compact rows of a model by sampling and slug, where there are none."""
        with self._locked():
            content = self._read(model)
            for sampling, found in rows.items():
                content["rows"][sampling] = found | content["rows"].get(sampling, {})
            self._write(f"{model}.json", content)

    def results(self) -> list[Result]:
        """The rows of the first sampling with those of the others as ``again``, sorted by model and slug."""
        first, *others = SEEDS
        found = []
        for path in sorted(self.folder.glob("*.json")):
            if path.name in (PUBLISHED, ELSEWHERE):
                continue
            content, model = self._read(path.stem), path.stem
            for slug, row in sorted(content["rows"].get(first, {}).items()):
                again = [content["rows"].get(sampling, {}).get(slug, {}) for sampling in others]
                again = [other for other in again if other and "failed" not in other]
                original = content["originals"].get(row.get("key", {}).get("model"))
                more = {} if original is None or "loss" not in row else {"loss_original": original}
                found.append({"model": model, "slug": slug, **row, **more, "again": again})
        return found

    def read(self, name: str) -> Result | None:
        """A file that is not of one model."""
        file = self.folder / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def write(self, name: str, content: Result) -> None:
        with self._locked():
            self._write(name, content)

    def _read(self, model: str) -> Result:
        return self.read(f"{model}.json") or {"originals": {}, "rows": {}}

    def _write(self, name: str, content: Result) -> None:
        if "originals" in content:
            used = {row.get("key", {}).get("model") for rows in content["rows"].values() for row in rows.values()}
            content["originals"] = {digest: loss for digest, loss in content["originals"].items() if digest in used}
        part = self.folder / f"{name}.part"
        part.write_text(formatted(content) + "\n", encoding="utf-8")
        os.replace(part, self.folder / name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def compact(result: Result) -> Result:
    """A result of ``jobs.Job`` without what its place in the store says, and with few digits."""
    row = {name: value for name, value in result.items() if name not in ("model", "sampling", "slug", "loss_original")}
    if "key" in row:
        row["key"] = {part: value[:DIGITS] for part, value in row["key"].items()}
    if "windows" in row:
        row["windows"] = row["windows"][:DIGITS]
    return {name: _rounded(name, value) for name, value in row.items()}


def formatted(value: Any, depth: int = 4, indent: str = "") -> str:
    """``value`` as JSON with sorted keys and one line for everything deeper than ``depth`` objects."""
    if not isinstance(value, dict) or depth == 0 or not value:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(key)}: {formatted(value[key], depth - 1, inner)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _rounded(name: str, value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{PRECISION.get(name, 5)}g}")
    if isinstance(value, list):
        return [_rounded(name, part) for part in value]
    if isinstance(value, dict):
        return {key: _rounded(key, part) for key, part in value.items()}
    return value
