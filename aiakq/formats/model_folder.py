"""A model's folder before any header is read: its JSON files, index file, manifest, and which shards hold its weights.

Nothing from the folder is executed, and no path may lead out of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from aiakq.errors import error

MANIFEST = "aiakq_manifest.json"
#: Part of the name of every folder that is still being written.
PARTIAL_MARK = ".aiakq-partial-"
#: The index file of safetensors shards.
INDEX = "model.safetensors.index.json"
_TORCH_INDEX = "pytorch_model.bin.index.json"
_MAX_JSON_BYTES = 64 << 20
#: Names of torch's files that hold weights, not a trainer's state.
_TORCH_FILES = ("pytorch_model*.bin", "gptq_model*.bin")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_json(path: Path, file: str) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises ``model_malformed`` naming ``file``."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES or not path.is_file():
            raise error("model_malformed", file=file, reason="it is too large or not a regular file")
        value = json.loads(path.read_bytes())
    except OSError as problem:
        raise error("model_malformed", file=file, reason=problem.strerror or str(problem)) from None
    except (ValueError, RecursionError) as problem:
        raise error("model_malformed", file=file, reason=f"it is not JSON ({problem})") from None
    if not isinstance(value, dict):
        raise error("model_malformed", file=file, reason="it is not a JSON object")
    return value


def shard_files(folder: Path, weights: str, ignore: Sequence[str]) -> dict[str, frozenset[str] | None]:
    """shard file -> the tensors its index puts there, or None for a single file without an index."""

    def files(*patterns: str) -> list[str]:
        found = [path.name for pattern in patterns for path in sorted(folder.glob(pattern))]
        return [name for name in found if not any(fnmatchcase(name, pattern) for pattern in ignore)]

    if weights != "pt":
        indexes = [INDEX] if (folder / INDEX).exists() else files("*.safetensors.index.json")
        shards = files("*.safetensors")
        if len(indexes) == 1:
            return _indexed_files(folder, indexes[0], ".safetensors", ignore)
        if "model.safetensors" in shards:
            return {"model.safetensors": None}
        if len(shards) == 1:
            return {shards[0]: None}
        if shards:
            missing = f"{INDEX}, which says what its {len(shards)} shards hold"
            raise error("model_incomplete", path=str(folder), missing=missing)
        if weights == "safetensors":
            raise error("model_incomplete", path=str(folder), missing="it holds no *.safetensors")
    if (folder / _TORCH_INDEX).exists():
        return _indexed_files(folder, _TORCH_INDEX, ".bin", ignore)
    shards = files(*_TORCH_FILES)
    if len(shards) == 1:
        return {shards[0]: None}
    if len(shards) > 1:
        missing = f"{_TORCH_INDEX}, which says what its {len(shards)} shards hold"
        raise error("model_incomplete", path=str(folder), missing=missing)
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise error("pickle_refused", path=str(folder), reason="there is no safetensors file and no pytorch_model.bin")
    missing = "it holds no pytorch_model*.bin" if weights == "pt" else "it holds no *.safetensors"
    raise error("model_incomplete", path=str(folder), missing=missing)


def _indexed_files(folder: Path, index: str, ending: str, ignore: Sequence[str]) -> dict[str, frozenset[str] | None]:
    """The files that an index names, with the tensors it puts there."""
    weight_map = read_json(folder / index, index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise error("model_malformed", file=index, reason="it has no weight_map of names to files")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        shards.setdefault(file, set()).add(name)
    for file in shards:
        if file != Path(file).name or file in ("", ".", "..") or not file.endswith(ending):
            raise error("path_outside_model", path=str(folder), file=file)
    absent = sorted(file for file in shards if not (folder / file).exists())
    if absent:
        raise error("model_incomplete", path=str(folder), missing=f"{some_of(absent)} of its index")
    return {
        file: frozenset(names)
        for file, names in sorted(shards.items())
        if not any(fnmatchcase(file, pattern) for pattern in ignore)
    }


def real_path(folder: Path, file: str) -> Path:
    """The real path of a shard, which must stay in the folder or in the hub cache the folder belongs to."""
    real = Path(os.path.realpath(folder / file))
    roots = [Path(os.path.realpath(folder))]
    # The hub cache links snapshots/<revision>/<file> to blobs/<hash>.
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise error("path_outside_model", path=str(folder), file=file)
    return real


def check_manifest(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder of ours that was never finished, or whose weights were cut off since."""
    path = folder / MANIFEST
    if not path.exists():
        if "aiakq" in config:
            raise error(
                "model_incomplete", path=str(folder), missing=f"{MANIFEST}, which aiakq writes last, is missing"
            )
        return
    files = read_json(path, MANIFEST).get("files")
    if not isinstance(files, dict):
        raise error("model_malformed", file=MANIFEST, reason="it lists no files")
    for file, entry in files.items():
        # Only weights: people may edit a config or a template, and should.
        if not file.endswith(".safetensors") or not isinstance(entry, dict):
            continue
        real = folder / Path(file).name
        if not real.exists():
            raise error("model_incomplete", path=str(folder), missing=f"{file} of its manifest")
        if real.stat().st_size != entry.get("size"):
            raise error("model_malformed", file=file, reason="its size is not the one in the manifest")


def some_of(names: list[str]) -> str:
    """At most five names of a list, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
