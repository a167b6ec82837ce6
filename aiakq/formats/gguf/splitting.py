"""GGUF files of at most a given size, as llama-gguf-split makes them; see file.py for how they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy

from aiakq.errors import error
from aiakq.formats.gguf.file import MAX_FILES
from aiakq.formats.gguf.writing import WrittenTensor, write_gguf


def write_parts(
    folder: Path,
    name: str,
    metadata: Mapping[str, object],
    tensors: Mapping[str, WrittenTensor],
    limit: int | None,
) -> list[Path]:
    """Write new files to ``folder`` and return their paths: one called ``name`` or, if the tensors take more than
    ``limit`` bytes, several with its stem.

    The first of several has all keys, as llama-gguf-split leaves them. Raises what ``write_gguf`` does, ``bad_option``.
    """
    plan = _plan(tensors, limit)
    if len(plan) == 1:
        path = folder / name
        write_gguf(path, metadata, tensors)
        return [path]
    if len(plan) > MAX_FILES:
        raise error(
            "bad_option", option="--max-shard-size", value=limit, expected=f"enough for {MAX_FILES} files", hint=""
        )
    paths = []
    for number, names in enumerate(plan):
        path = folder / f"{Path(name).stem}-{number + 1:05d}-of-{len(plan):05d}.gguf"
        split = {
            "split.no": numpy.uint16(number),
            "split.tensors.count": numpy.int32(len(tensors)),
            "split.count": numpy.uint16(len(plan)),
        }
        write_gguf(path, {**metadata, **split} if number == 0 else split, {each: tensors[each] for each in names})
        paths.append(path)
    return paths


def is_part(path: Path) -> bool:
    """Whether the name of a file is that of one of several; see file.py."""
    return re.fullmatch(r".*-[0-9]{5}-of-[0-9]{5}\.gguf", path.name) is not None


def files_of(output: Path) -> list[Path]:
    """Return the file ``output`` and all parts with its stem that exist."""
    parts = re.compile(re.escape(output.stem) + r"-[0-9]{5}-of-[0-9]{5}\.gguf")
    beside = sorted(output.parent.iterdir()) if output.parent.is_dir() else []
    return [path for path in beside if path.name == output.name or parts.fullmatch(path.name)]


def _plan(tensors: Mapping[str, WrittenTensor], limit: int | None) -> list[list[str]]:
    """Return the names of the tensors of each file."""
    plan: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if plan[-1] and limit is not None and filled + tensor.nbytes > limit:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += tensor.nbytes
    return plan
