"""Measure what quantization costs, ours and other tools', and write docs/quality.md. Run by ``make quality``.

Every row of examples/peers/rows.py on the example model, on a larger one with outlier channels, and a few on the
example model with outliers planted. A tool gets a virtual environment and a process of its own, and every checkpoint is
scored by our runtime in float32 on the same windows. Finished rows are kept: an interrupted run goes on where it
stopped, what failed is tried again, and what others disturbed is timed again.

    python examples/quality.py [--fresh] [--only WORDS] [--no-peers] [--page]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "examples" / "peers"
sys.path[:0] = [str(ROOT / "examples"), str(PEERS)]

import check_elsewhere  # noqa: E402
import environments  # noqa: E402
import neighbours  # noqa: E402
import outliers  # noqa: E402
import quality_page  # noqa: E402
import torch  # noqa: E402
from rows import ROWS, Row  # noqa: E402

from aiakq.evaluation import metrics as evaluate  # noqa: E402
from aiakq.evaluation.scoring import load_for_scoring  # noqa: E402
from aiakq.quantizers.calibration import samples as calibration  # noqa: E402
from aiakq.quantizers.options import QuantizeOptions  # noqa: E402
from aiakq.terminal import console  # noqa: E402

OUT = Path(os.environ.get("OUT", ROOT / "out" / "quality")).resolve()
EXAMPLE, HELDOUT = ROOT / "examples" / "tinybooks", ROOT / "examples" / "heldout.txt"
WINDOW, WINDOWS = 512, 64
#: The longest that one tool may take for one row, in seconds.
PATIENCE = 3 * 3600
#: The longest that it waits for others to leave the machine alone, in seconds.
QUIET = 60
#: Checkpoints of the example model that are asked about in other engines, by the row they are from.
ELSEWHERE = ("weight_only_int8", "smooth_quant", "awq", "gptq")


@dataclass
class Subject:
    """A model to quantize: its folder, a file of calibration ids, and windows [W, T] of ids to score."""

    key: str
    folder: Path
    calibration: Path
    windows: torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="measure every row again")
    parser.add_argument("--only", default="", help="rows 'books: aiakq, KIND: NAME' that this regular expression fits")
    parser.add_argument("--no-peers", action="store_true", help="our own rows only")
    parser.add_argument(
        "--page", action="store_true", help="write the page from what was measured, and measure nothing"
    )
    asked = parser.parse_args()
    asked.no_peers |= os.environ.get("PEERS") == "0"
    os.chdir(ROOT)
    OUT.mkdir(parents=True, exist_ok=True)
    if not asked.page:
        measure_all(asked)
        if not asked.only:
            ask_elsewhere(asked)
    results = [json.loads(path.read_text()) for path in sorted(OUT.glob("*/*.result.json"))]
    elsewhere = OUT / "elsewhere.json"
    loads = json.loads(elsewhere.read_text())["rows"] if elsewhere.is_file() else []
    page = quality_page.page(ROWS, results, check_elsewhere.table(loads), ROOT)
    (ROOT / "docs" / "quality.md").write_text(page, encoding="utf-8")


# --- measuring ----------------------------------------------------------------------------------------------------


def measure_all(asked: argparse.Namespace) -> None:
    """Every row on every subject, one after the other; what is finished and unchanged is left alone."""
    subjects = [example(), with_outliers("outliers", "random"), with_outliers("books-outliers", "books")]
    todo = [(subject, row) for subject in subjects for row in ROWS if wanted(row, subject, asked)]
    originals: dict[str, Remembered] = {}
    with console.ProgressBars("quality") as bars:
        for index, (subject, row) in enumerate(todo):
            bars.update("measure", index, len(todo), f"{subject.key}: {row.tool}, {row.name}")
            file = OUT / subject.key / f"{row.slug}.result.json"
            stamp = stamp_of(row, subject)
            known = json.loads(file.read_text()) if file.is_file() and not asked.fresh else {}
            if known.get("stamp") == stamp and "failed" not in known:
                if known.get("busy", 1) >= neighbours.NOISY:
                    time_again(known, row, subject, file)
                continue
            result = quantize(row, subject)
            if "failed" not in result:
                original = originals.setdefault(subject.key, Remembered(subject.folder))
                result |= score(folder_of(row, subject), original, subject)
            file.write_text(json.dumps({"model": subject.key, "slug": row.slug, "stamp": stamp, **result}))
            clean_up(row, subject)
        bars.update("measure", len(todo), len(todo), "")


def time_again(known: dict[str, Any], row: Row, subject: Subject, file: Path) -> None:
    """Quantize once more, because others disturbed the last time; the quieter of the two counts."""
    result = quantize(row, subject)
    if "failed" not in result and result["busy"] < known.get("busy", 1):
        known |= {name: result[name] for name in ("seconds", "busy")}
        file.write_text(json.dumps(known))
    clean_up(row, subject)


def clean_up(row: Row, subject: Subject) -> None:
    """Remove a checkpoint that nobody asks for any more."""
    if subject.key != "books" or row.tool != "aiakq" or row.name not in ELSEWHERE:
        shutil.rmtree(folder_of(row, subject), ignore_errors=True)


def wanted(row: Row, subject: Subject, asked: argparse.Namespace) -> bool:
    words = f"{subject.key}: {row.tool}, {row.kind}: {row.name}"
    return (
        subject.key in row.models
        and re.search(asked.only, words) is not None
        and (row.tool == "aiakq" or not asked.no_peers)
    )


def folder_of(row: Row, subject: Subject) -> Path:
    return OUT / subject.key / row.slug


def stamp_of(row: Row, subject: Subject) -> str:
    """What the row's result depends on: when this changes it is measured again."""
    state = hashlib.sha256(json.dumps([asdict(row), torch.get_num_threads()], sort_keys=True).encode())
    state.update(subject.calibration.read_bytes())
    if row.tool == "aiakq":
        for path in sorted([*ROOT.glob("aiakq/quantizers/**/*.py"), *ROOT.glob("aiakq/formats/*.py")]):
            state.update(path.read_bytes())
    else:
        state.update(json.dumps(asdict(environments.ENVIRONMENTS[row.tool])).encode())
    state.update((PEERS / f"peer_{row.tool}.py").read_bytes())
    return state.hexdigest()


def quantize(row: Row, subject: Subject) -> dict[str, Any]:
    """Run the tool's script in its environment: seconds, peak memory and versions, or ``failed`` and why."""
    python = Path(sys.executable) if row.tool == "aiakq" else environments.python_of(row.tool, check_elsewhere.VENVS)
    if isinstance(python, str):
        return {"failed": python}
    output = folder_of(row, subject)
    request, result, log = (output.with_name(f"{row.slug}.{end}") for end in ("request.json", "json", "log"))
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    asked = {
        "model": str(subject.folder),
        "output": str(output),
        "calibration": str(subject.calibration),
        "threads": torch.get_num_threads(),
        **row.request,
    }
    request.write_text(json.dumps(asked))
    neighbours.wait_until_quiet(QUIET)
    words = [str(python), str(PEERS / f"peer_{row.tool}.py"), str(request), str(result)]
    before = neighbours.Used.now()
    with log.open("w") as out:
        try:
            code = subprocess.run(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=output.parent,
                env=environments.variables(),
                timeout=PATIENCE,
            ).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"not finished after {PATIENCE // 3600} hours"}
    if code or not result.is_file():
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"failed": f"failed: {(lines or ['no word'])[-1][:160]}"}
    return {**json.loads(result.read_text()), "busy": neighbours.Used.now().by_others(before)}


# --- scoring ------------------------------------------------------------------------------------------------------


class Remembered:
    """A model whose logits are computed once per window and kept."""

    def __init__(self, folder: Path) -> None:
        self.model = load_for_scoring(folder)
        self.known: dict[bytes, torch.Tensor] = {}

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        key = ids.numpy().tobytes()
        if key not in self.known:
            self.known[key] = self.model.logits(ids)
        return self.known[key]


def score(folder: Path, original: Remembered, subject: Subject) -> dict[str, Any]:
    """Compare a checkpoint with its original, window by window, so that differences carry their standard error."""
    try:
        model = load_for_scoring(folder)
    except Exception as problem:
        return {"failed": f"does not load here: {problem}"[:200]}
    windows = [evaluate.compare(model, original, ids.unsqueeze(0)) for ids in subject.windows]
    files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    return {
        "loss": [math.log(window.perplexity) for window in windows],
        "loss_original": [math.log(window.perplexity_original) for window in windows],
        "kl": [window.kl for window in windows],
        "same": [window.top1_agreement for window in windows],
        "bytes": sum(path.stat().st_size for path in files),
    }


# --- the models -----------------------------------------------------------------------------------------------------


def example() -> Subject:
    """The example model, the calibration samples that ``aiakq quantize`` picks, and a book it never saw."""
    tokenizer = calibration.load_tokenizer(EXAMPLE)
    options = QuantizeOptions(input=str(EXAMPLE), output="unused", method="gptq")
    chosen = calibration.load_samples(options, tokenizer, len(tokenizer))
    file = OUT / "calibration.json"
    write_ids(file, (sample.tolist() for sample in chosen.samples))
    texts = calibration.tokenize(calibration.read_documents(HELDOUT), tokenizer)
    ids = [token for text in texts for token in text]
    return Subject("books", EXAMPLE, file, evaluate.windows(ids, WINDOW, WINDOWS))


def with_outliers(key: str, kind: str) -> Subject:
    """A model of examples/outliers.py, made if it is not there or that file has changed."""
    folder = OUT / "models" / key
    made_by = hashlib.sha256((ROOT / "examples" / "outliers.py").read_bytes()).hexdigest()
    marker = folder / "made_by"
    if not marker.is_file() or marker.read_text() != made_by:
        print(f"making the model {key}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        getattr(outliers, f"make_{kind}")(folder)
        marker.write_text(made_by)
    if kind == "books":
        text = example()
        return Subject(key, folder, text.calibration, text.windows)
    windows = torch.tensor(json.loads((folder / outliers.HELDOUT_FILE).read_text()))
    return Subject(key, folder, folder / outliers.CALIBRATION_FILE, windows)


def write_ids(file: Path, samples: Iterable[list[int]]) -> None:
    text = json.dumps(list(samples))
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)


# --- in other engines -------------------------------------------------------------------------------------------------


def ask_elsewhere(asked: argparse.Namespace) -> None:
    """Load our four default outputs in other engines, once per state of the checkpoints."""
    if asked.no_peers:
        return
    folders = {row.name: OUT / "books" / row.slug for row in ROWS if row.tool == "aiakq" and row.name in ELSEWHERE}
    folders = {name: folder for name, folder in folders.items() if (folder / "config.json").is_file()}
    state = hashlib.sha256(json.dumps([asdict(e) for e in environments.ENVIRONMENTS.values()]).encode())
    for path in [
        *sorted(PEERS.glob("*.py")),
        *(path for folder in folders.values() for path in sorted(folder.glob("*.safetensors"))),
    ]:
        state.update(path.read_bytes())
    file = OUT / "elsewhere.json"
    if file.is_file() and not asked.fresh and json.loads(file.read_text())["stamp"] == state.hexdigest():
        return
    rows = check_elsewhere.check(EXAMPLE, folders, OUT / "elsewhere")
    file.write_text(json.dumps({"stamp": state.hexdigest(), "rows": rows}))


if __name__ == "__main__":
    main()
