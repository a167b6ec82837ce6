"""Committed steps of an unfinished checkpoint, from which an interrupted run resumes.

A step is a safetensors file and a JSON file with its sha256, which is renamed into place afterwards: both are required.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

STEP_PREFIX = "step-"


@dataclass(frozen=True)
class CommittedStep:
    """A committed step of a checkpoint that is being written.

    file     the safetensors file inside the partial folder.
    tensors  names of its tensors; ``sizes`` are their bytes.
    beside   the names of tensors that go into the file beside the weights.
    note     JSON values that were committed with it.
    """

    name: str
    file: Path
    tensors: tuple[str, ...]
    sizes: tuple[int, ...]
    note: dict[str, Any]
    beside: tuple[str, ...] = ()


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, read on each access and not cached. ``sources``: the step's file, and the name in it."""

    def __init__(self, sources: Mapping[str, tuple[Path, str]]) -> None:
        self.sources = sources

    def __getitem__(self, name: str) -> Tensor:
        file, inside = self.sources[name]
        with safetensors.safe_open(file, framework="pt", device="cpu") as handle:
            tensor: Tensor = handle.get_tensor(inside)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)


def whole_steps(folder: Path, fingerprint: str) -> Iterator[CommittedStep]:
    """Return the steps in ``folder``, up to the first that is missing, damaged or has another fingerprint."""
    for number in range(100_000):
        file = folder / f"{STEP_PREFIX}{number:05d}.safetensors"
        try:
            entry = json.loads(file.with_suffix(".json").read_bytes())
            with open(file, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if entry["fingerprint"] != fingerprint or entry["sha256"] != digest:
                return
            tensors = entry["tensors"]
            sizes, beside = tuple(tensors.values()), tuple(entry["beside"])
            step = CommittedStep(entry["name"], file, tuple(tensors), sizes, entry["note"], beside)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        yield step


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and sync it to disk. Raises OSError."""
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
