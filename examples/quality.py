"""Measure the quality loss of quantization by aiakq and other tools (docs/quality.md). Run by ``make quality``.

The rows are those of examples/peers/rows.py, on the models of examples/peers/subjects.py, with two samplings of the
calibration text. Each tool has its own virtual environment and process with one thread, and every checkpoint is scored
by aiakq's runtime in float32 on the same windows. Checkpoints are kept in $OUT (out/quality), and every measured row in
examples/peers/results, of which the page is made: an interrupted run continues where it stopped, on another machine
too, several runs share the work, and rows that depend on something that has changed are measured again. Failed rows are
repeated only with --retry.

    python examples/quality.py [--model FOLDER] [--only WORDS] [--samplings s0] [--no-peers] [--status] [--page]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "examples" / "peers"
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "training"), str(PEERS)]

import check_elsewhere  # noqa: E402
import environments  # noqa: E402
import fidelity  # noqa: E402
import quality_page  # noqa: E402
import store  # noqa: E402
import subjects as models  # noqa: E402
import torch  # noqa: E402
from jobs import Job, commit, words_of  # noqa: E402
from rows import ALL, REAL, ROWS, kind_of  # noqa: E402
from subjects import EXAMPLE, SEEDS, WINDOW, Subject  # noqa: E402

from aiakq.evaluation.scoring import load_for_scoring  # noqa: E402
from aiakq.terminal import console  # noqa: E402

Result = dict[str, Any]
OUT = Path(os.environ.get("OUT", ROOT / "out" / "quality")).resolve()
#: Rows whose checkpoints of the example model are also loaded in other engines.
ELSEWHERE = {
    "8-bit weights, one scale per row": "weight_only_int8",
    "8-bit weights and activations": "smooth_quant",
    kind_of(4, False): "awq",
    kind_of(4, True): "gptq",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, action="append", default=[], help="also a real model; may be repeated")
    parser.add_argument("--only", default="", help="rows 'books, s0: aiakq, KIND: NAME' that match this expression")
    parser.add_argument("--samplings", nargs="+", default=list(SEEDS), choices=list(SEEDS))
    parser.add_argument("--no-peers", action="store_true", help="only rows of aiakq")
    parser.add_argument("--fresh", action="store_true", help="measure every row again")
    parser.add_argument("--retry", action="store_true", help="measure failed rows again")
    parser.add_argument("--status", action="store_true", help="list what is measured, missing, stale and failed")
    parser.add_argument("--page", action="store_true", help="write the page from stored results without measuring")
    args = parser.parse_args()
    args.no_peers |= os.environ.get("PEERS") == "0"
    args.model += [Path(os.environ["MODEL"])] if os.environ.get("MODEL") else []
    os.chdir(ROOT)
    torch.set_num_threads(1)
    kept = store.Store()
    if not args.page:
        jobs = wanted_jobs(args)
        if args.status:
            print_status(jobs, kept)
            return
        measure_all(jobs, kept, args)
        if args.only:
            return
        load_elsewhere(kept, args)
    page = quality_page.page(ROWS, kept.results(), kept.read(store.ELSEWHERE), kept.read(store.PUBLISHED))
    (ROOT / "docs" / "quality.md").write_text(page, encoding="utf-8")


# --- measuring ----------------------------------------------------------------------------------------------------


def wanted_jobs(args: argparse.Namespace) -> list[Job]:
    """The selected rows on every model with every sampling, one model after another."""
    folders = models.folders(args.model)
    chosen = {
        key: [
            (sampling, row)
            for sampling in args.samplings
            for row in ROWS
            if (key if key in ALL else REAL) in row.models
            and (row.tool == "aiakq" or not args.no_peers)
            and re.search(args.only, words_of(key, sampling, row)) is not None
        ]
        for key in folders
    }
    chosen = {key: rows for key, rows in chosen.items() if rows}
    if args.status:
        chosen = {key: rows for key, rows in chosen.items() if (folders[key] / "config.json").is_file()}
    else:
        models.train_missing(chosen)
    loaded = {key: models.load_subject(key, folders[key], OUT) for key in chosen}
    return [Job(row, loaded[key], sampling, OUT) for key, rows in chosen.items() for sampling, row in rows]


def measure_all(jobs: list[Job], kept: store.Store, args: argparse.Namespace) -> None:
    """Quantize and score everything that has no result that is up to date, and keep the results."""
    original: CachedLogits | None = None
    with console.ProgressBars("quality") as bars:
        for index, job in enumerate(jobs):
            bars.update("measure", index, len(jobs), job.words)
            with job.claimed() as mine:
                if not mine or not (args.fresh or is_due(job, kept, args.retry)):
                    continue
                result = job.stored()
                if args.fresh or job.stale() or (args.retry and "failed" in result):
                    result = job.quantize()
                if "failed" not in result and (args.fresh or result.get("windows") != windows_hash(job.subject)):
                    if original is None or original.folder != job.subject.folder:
                        original = CachedLogits(job.subject.folder)
                    job.store({**result, "windows": windows_hash(job.subject), **score(job, original)})
                kept.keep(job.stored())
        bars.update("measure", len(jobs), len(jobs), "")


def is_due(job: Job, kept: store.Store, retry: bool) -> bool:
    """Whether a job has to be quantized, scored or kept."""
    state, _ = state_of(job, kept_row(job, kept))
    return state != "measured" and (retry or state != "failed")


def kept_row(job: Job, kept: store.Store) -> Result:
    return kept.row(job.subject.key, job.sampling, job.row.slug)


def state_of(job: Job, result: Result) -> tuple[str, str]:
    """In a word how far a job is according to a result, and why."""
    if not result or "published" in result:
        return "missing", "published on an earlier page" if result else ""
    if stale := job.differences(result):
        return "stale", ", ".join(stale)
    if "failed" in result:
        return "failed", result["failed"]
    if not windows_hash(job.subject).startswith(result.get("windows", "no windows")):
        return "to be scored", ""
    return "measured", ""


def windows_hash(subject: Subject) -> str:
    """A hash of what the scores depend on besides the checkpoint; new scores do not need new checkpoints."""
    state = hashlib.sha256(subject.windows.numpy().tobytes())
    for path in [*sorted(ROOT.glob("aiakq/evaluation/*.py")), PEERS / "fidelity.py"]:
        state.update(path.read_bytes())
    return state.hexdigest()


def print_status(jobs: list[Job], kept: store.Store) -> None:
    """One line for each job that is not measured, with the reason, and the number of each state."""
    states: Counter[str] = Counter()
    for job in jobs:
        state, why = state_of(job, kept_row(job, kept))
        states[state] += 1
        if state != "measured":
            print(f"{state}: {job.words} {why}".rstrip())
    print(", ".join(f"{count} {state}" for state, count in sorted(states.items())))


# --- scoring ------------------------------------------------------------------------------------------------------


class CachedLogits:
    """A model whose logits are cached per window."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = load_for_scoring(folder)
        self.known: dict[bytes, torch.Tensor] = {}

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        key = ids.numpy().tobytes()
        if key not in self.known:
            self.known[key] = self.model.logits(ids)
        return self.known[key]


def score(job: Job, original: CachedLogits) -> dict[str, Any]:
    """Compare a checkpoint with its original, window by window, so that differences have intervals."""
    folder, cache = job.checkpoint, job.row.request.get("kv_cache_dtype", "auto")
    try:
        model = load_for_scoring(folder, kv_cache_dtype=cache)
    except Exception as problem:
        return {"failed": f"does not load here: {problem}"[:200]}
    tokenizer, vocabulary = original.model.config.tokenizer.load(), original.model.model.vocab_size
    texts = fidelity.other_texts(model, original, tokenizer.hf, vocabulary, WINDOW) if tokenizer.has_text else {}
    files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf")]
    return {
        **fidelity.scores(model, original, job.subject.windows),
        "texts": texts,
        "bytes": sum(path.stat().st_size for path in files),
    }


# --- in other engines -------------------------------------------------------------------------------------------------


def load_elsewhere(kept: store.Store, args: argparse.Namespace) -> None:
    """Load aiakq's four default outputs in other engines, once per version of the checkpoints."""
    if args.no_peers:
        return
    ours = [row for row in ROWS if row.tool == "aiakq" and ELSEWHERE.get(row.kind) == row.name]
    folders = {row.name: OUT / "books" / next(iter(SEEDS)) / row.slug for row in ours}
    folders = {name: folder for name, folder in folders.items() if (folder / "config.json").is_file()}
    state = hashlib.sha256(json.dumps([asdict(e) for e in environments.ENVIRONMENTS.values()]).encode())
    for path in [
        *sorted(PEERS.glob("*.py")),
        *(path for folder in folders.values() for path in sorted(folder.glob("*.safetensors"))),
    ]:
        state.update(path.read_bytes())
    known = kept.read(store.ELSEWHERE) or {}
    if not folders or (known.get("stamp") == state.hexdigest() and not args.fresh):
        return
    rows = check_elsewhere.check(EXAMPLE, folders, OUT / "elsewhere")
    kept.write(store.ELSEWHERE, {"stamp": state.hexdigest(), "commit": commit(), "rows": rows})


if __name__ == "__main__":
    main()
