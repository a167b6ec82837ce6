"""Runs of the rows of ``make quality``: one process each, and results in files that say what they depend on.

A row, a model and a sampling of calibration make a job. Its result holds a key: hashes of the model, the request, the
samples and the tool. A result whose key has changed is stale, and the job runs again; so do interrupted jobs. Several
runs may share a folder: a job is locked while it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import environments
from rows import Row
from subjects import Subject

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "examples" / "peers"
#: Tools whose scripts run in our environment: ours, and programs.
OURS = ("aiakq", "llamacpp")
#: Time limit of a job, in seconds of wall time.
TIMEOUT = 6 * 3600
#: Threads of every tool: with one, processor seconds can be compared however busy the machine is.
THREADS = 1


@dataclass(frozen=True)
class Job:
    """A row on a model with one sampling of the calibration text; ``out`` is the folder of all results."""

    row: Row
    subject: Subject
    sampling: str
    out: Path

    @property
    def checkpoint(self) -> Path:
        """The folder of the quantized model."""
        return self.out / self.subject.key / self.sampling / self.row.slug

    @property
    def words(self) -> str:
        """The job in words, for --only and progress."""
        return words_of(self.subject.key, self.sampling, self.row)

    def file(self, end: str) -> Path:
        """A file beside the checkpoint."""
        return self.checkpoint.with_name(f"{self.row.slug}.{end}")

    @property
    def key(self) -> dict[str, str]:
        """Hashes of all that the checkpoint depends on."""
        return {
            "model": self.subject.digest,
            "request": _hash(json.dumps(self.row.request, sort_keys=True).encode()),
            "calibration": _hash(self.subject.calibrations[self.sampling].read_bytes()),
            "tool": tool_hash(self.row.tool),
        }

    def stored(self) -> dict[str, Any]:
        """The stored result, if there is one, up to date or not."""
        file = self.file("result.json")
        return json.loads(file.read_text()) if file.is_file() else {}

    def stale(self) -> list[str]:
        """The parts of the key in which the stored result differs; all if there is none."""
        return self.differences(self.stored())

    def differences(self, result: dict[str, Any]) -> list[str]:
        """The parts of the key in which a result differs; its hashes may be shortened (``store.compact``)."""
        known = result.get("key", {})
        return [part for part, value in self.key.items() if not (known.get(part) and value.startswith(known[part]))]

    def quantize(self) -> dict[str, Any]:
        """Run the job and store its result: cost and versions, or ``failed`` with the reason."""
        result = {"key": self.key, "commit": commit(), **_run(self)}
        self.store(result)
        return result

    def store(self, result: dict[str, Any]) -> None:
        """Replace the stored result."""
        whole = {"model": self.subject.key, "sampling": self.sampling, "slug": self.row.slug, **result}
        part = self.file("result.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(whole))
        os.replace(part, self.file("result.json"))

    @contextlib.contextmanager
    def claimed(self) -> Iterator[bool]:
        """Whether this process may run the job; False while another one does."""
        lock = self.file("lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def words_of(key: str, sampling: str, row: Row) -> str:
    """A row on a model with a sampling, in words."""
    return f"{key}, {sampling}: {row.tool}, {row.kind}: {row.name}"


def tool_hash(tool: str) -> str:
    """A hash of the tool: of our sources, or of the versions of another tool's environment; and of its script."""
    state = hashlib.sha256((PEERS / f"peer_{tool}.py").read_bytes())
    if tool == "aiakq":
        for path in sorted([*ROOT.glob("aiakq/quantizers/**/*.py"), *ROOT.glob("aiakq/formats/*.py")]):
            state.update(path.read_bytes())
    elif tool not in OURS:
        state.update(json.dumps(asdict(environments.ENVIRONMENTS[tool])).encode())
    return state.hexdigest()


def commit() -> str:
    """The commit of this tree."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _run(job: Job) -> dict[str, Any]:
    """Run the tool's script in its environment."""
    row = job.row
    python = Path(sys.executable) if row.tool in OURS else environments.python_of(row.tool)
    if isinstance(python, str):
        return {"failed": python}
    request, result, log = (job.file(end) for end in ("request.json", "cost.json", "log"))
    shutil.rmtree(job.checkpoint, ignore_errors=True)
    request.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    values = {
        "model": str(job.subject.folder),
        "output": str(job.checkpoint),
        "calibration": str(job.subject.calibrations[job.sampling]),
        "threads": THREADS,
        **row.request,
    }
    request.write_text(json.dumps(values))
    words = [str(python), str(PEERS / f"peer_{row.tool}.py"), str(request), str(result)]
    with log.open("w") as out:
        try:
            code = subprocess.run(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=environments.variables(THREADS),
                timeout=TIMEOUT,
            ).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"not finished after {TIMEOUT // 3600} hours"}
    if code or not result.is_file():
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return {"failed": f"failed: {(errors or lines or ['no word'])[-1][:160]}"}
    return json.loads(result.read_text())
