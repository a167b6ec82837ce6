"""Measure the quality loss of quantization by aiakq and other tools (docs/quality.md). Run by ``make quality``.

The rows are those of examples/peers/rows.py: on the example model, on a larger model with outlier channels, and a few
on the example model with added outliers. Each tool has its own virtual environment and process, and every checkpoint is
scored by aiakq's runtime in float32 on the same windows. Results are stored: an interrupted run continues where it
stopped, failed rows are repeated, and so are timings taken under load from other processes.

    python examples/quality.py [--fresh] [--only WORDS] [--no-peers] [--page]
"""

from __future__ import annotations

import argparse
import hashlib
import json
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
import fidelity  # noqa: E402
import machine_load  # noqa: E402
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
#: Time limit of one row, in seconds.
TIMEOUT = 3 * 3600
#: Longest wait for an idle machine before a row, in seconds.
IDLE_TIMEOUT = 60
#: Rows whose checkpoints of the example model are also loaded in other engines.
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
    parser.add_argument("--only", default="", help="rows 'books: aiakq, KIND: NAME' that match this regular expression")
    parser.add_argument("--no-peers", action="store_true", help="only rows of aiakq")
    parser.add_argument("--page", action="store_true", help="write the page from stored results without measuring")
    args = parser.parse_args()
    args.no_peers |= os.environ.get("PEERS") == "0"
    os.chdir(ROOT)
    OUT.mkdir(parents=True, exist_ok=True)
    if not args.page:
        measure_all(args)
        if not args.only:
            load_elsewhere(args)
    results = [json.loads(path.read_text()) for path in sorted(OUT.glob("*/*.result.json"))]
    elsewhere = OUT / "elsewhere.json"
    loads = json.loads(elsewhere.read_text())["rows"] if elsewhere.is_file() else []
    page = quality_page.page(ROWS, results, check_elsewhere.table(loads), ROOT)
    (ROOT / "docs" / "quality.md").write_text(page, encoding="utf-8")


# --- measuring ----------------------------------------------------------------------------------------------------


def measure_all(args: argparse.Namespace) -> None:
    """Measure every row on every subject, except those with an up-to-date result."""
    subjects = [example(), with_outliers("outliers", "random"), with_outliers("books-outliers", "books")]
    todo = [(subject, row) for subject in subjects for row in ROWS if wanted(row, subject, args)]
    originals: dict[str, CachedLogits] = {}
    with console.ProgressBars("quality") as bars:
        for index, (subject, row) in enumerate(todo):
            bars.update("measure", index, len(todo), f"{subject.key}: {row.tool}, {row.name}")
            file = OUT / subject.key / f"{row.slug}.result.json"
            stamp = stamp_of(row, subject)
            known = json.loads(file.read_text()) if file.is_file() and not args.fresh else {}
            if known.get("stamp") == stamp and "failed" not in known:
                if known.get("busy", 1) >= machine_load.MAX_OTHERS_SHARE:
                    repeat_timing(known, row, subject, file)
                continue
            result = quantize(row, subject)
            if "failed" not in result:
                original = originals.setdefault(subject.key, CachedLogits(subject.folder))
                result |= score(folder_of(row, subject), original, subject)
            file.write_text(json.dumps({"model": subject.key, "slug": row.slug, "stamp": stamp, **result}))
            remove_checkpoint(row, subject)
        bars.update("measure", len(todo), len(todo), "")


def repeat_timing(known: dict[str, Any], row: Row, subject: Subject, file: Path) -> None:
    """Quantize again, because other processes used the machine; the timing with less load is kept."""
    result = quantize(row, subject)
    if "failed" not in result and result["busy"] < known.get("busy", 1):
        known |= {name: result[name] for name in ("seconds", "busy")}
        file.write_text(json.dumps(known))
    remove_checkpoint(row, subject)


def remove_checkpoint(row: Row, subject: Subject) -> None:
    """Remove a checkpoint that is no longer needed."""
    if subject.key != "books" or row.tool != "aiakq" or row.name not in ELSEWHERE:
        shutil.rmtree(folder_of(row, subject), ignore_errors=True)


def wanted(row: Row, subject: Subject, args: argparse.Namespace) -> bool:
    words = f"{subject.key}: {row.tool}, {row.kind}: {row.name}"
    return (
        subject.key in row.models
        and re.search(args.only, words) is not None
        and (row.tool == "aiakq" or not args.no_peers)
    )


def folder_of(row: Row, subject: Subject) -> Path:
    return OUT / subject.key / row.slug


def stamp_of(row: Row, subject: Subject) -> str:
    """A hash of everything that the row's result depends on; a row with another one is measured again."""
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
    """Run the tool's script in its environment: seconds, peak memory and versions, or ``failed`` with the reason."""
    python = Path(sys.executable) if row.tool == "aiakq" else environments.python_of(row.tool, check_elsewhere.VENVS)
    if isinstance(python, str):
        return {"failed": python}
    output = folder_of(row, subject)
    request, result, log = (output.with_name(f"{row.slug}.{end}") for end in ("request.json", "json", "log"))
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    values = {
        "model": str(subject.folder),
        "output": str(output),
        "calibration": str(subject.calibration),
        "threads": torch.get_num_threads(),
        **row.request,
    }
    request.write_text(json.dumps(values))
    machine_load.wait_until_idle(IDLE_TIMEOUT)
    words = [str(python), str(PEERS / f"peer_{row.tool}.py"), str(request), str(result)]
    before = machine_load.CpuTime.now()
    with log.open("w") as out:
        try:
            code = subprocess.run(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=output.parent,
                env=environments.variables(),
                timeout=TIMEOUT,
            ).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"not finished after {TIMEOUT // 3600} hours"}
    if code or not result.is_file():
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"failed": f"failed: {(lines or ['no word'])[-1][:160]}"}
    return {**json.loads(result.read_text()), "busy": machine_load.CpuTime.now().others_share(before)}


# --- scoring ------------------------------------------------------------------------------------------------------


class CachedLogits:
    """A model whose logits are cached per window."""

    def __init__(self, folder: Path) -> None:
        self.model = load_for_scoring(folder)
        self.known: dict[bytes, torch.Tensor] = {}

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        key = ids.numpy().tobytes()
        if key not in self.known:
            self.known[key] = self.model.logits(ids)
        return self.known[key]


def score(folder: Path, original: CachedLogits, subject: Subject) -> dict[str, Any]:
    """Compare a checkpoint with its original, window by window, so that differences have intervals."""
    try:
        model = load_for_scoring(folder)
    except Exception as problem:
        return {"failed": f"does not load here: {problem}"[:200]}
    tokenizer, vocabulary = original.model.config.tokenizer.load(), original.model.model.vocab_size
    texts = fidelity.other_texts(model, original, tokenizer.hf, vocabulary, WINDOW) if tokenizer.has_text else {}
    files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    return {
        **fidelity.scores(model, original, subject.windows),
        "texts": texts,
        "bytes": sum(path.stat().st_size for path in files),
    }


# --- the models -----------------------------------------------------------------------------------------------------


def example() -> Subject:
    """The example model, the calibration samples of ``aiakq quantize``, and a book that it was not trained on."""
    tokenizer = calibration.load_tokenizer(EXAMPLE)
    options = QuantizeOptions(input=str(EXAMPLE), output="unused", method="gptq")
    chosen = calibration.load_samples(options, tokenizer, len(tokenizer))
    file = OUT / "calibration.json"
    write_ids(file, (sample.tolist() for sample in chosen.samples))
    texts = calibration.tokenize(calibration.read_documents(HELDOUT), tokenizer)
    ids = [token for text in texts for token in text]
    return Subject("books", EXAMPLE, file, evaluate.windows(ids, WINDOW, WINDOWS))


def with_outliers(key: str, kind: str) -> Subject:
    """A model of examples/outliers.py, made if it is missing or that file has changed."""
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


def load_elsewhere(args: argparse.Namespace) -> None:
    """Load aiakq's four default outputs in other engines, once per version of the checkpoints."""
    if args.no_peers:
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
    if file.is_file() and not args.fresh and json.loads(file.read_text())["stamp"] == state.hexdigest():
        return
    rows = check_elsewhere.check(EXAMPLE, folders, OUT / "elsewhere")
    file.write_text(json.dumps({"stamp": state.hexdigest(), "rows": rows}))


if __name__ == "__main__":
    main()
