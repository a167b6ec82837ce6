"""Checkpoint folders: found, checked from their headers alone, and read tensor by tensor.

Nothing here executes anything from the folder: no Python, no path that leaves it, and pickles only as plain tensors
(torch_file.py), where a model has no safetensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from aiakq import formats
from aiakq.errors import AiakqError, error
from aiakq.formats import quantization_config
from aiakq.formats.safetensors_file import TensorInfo, read_header
from aiakq.formats.torch_file import describe, read_torch_file
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

MANIFEST = "aiakq_manifest.json"
#: Part of the name of every folder that is still being written.
PARTIAL_MARK = ".aiakq-partial-"
INDEX = "model.safetensors.index.json"
_TORCH_INDEX = "pytorch_model.bin.index.json"
#: What is fetched from the hub beside weights: config, tokenizer, templates.
_HUB_REST = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
#: The weights: torch's own files only where there are no others, or where they are asked for.
_HUB_SAFETENSORS = ["*.safetensors"]
_HUB_TORCH = ["pytorch_model*.bin"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_JSON_BYTES = 64 << 20
#: Names of torch's files that hold weights, not a trainer's state.
_TORCH_FILES = ("pytorch_model*.bin", "gptq_model*.bin")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve_model(
    name_or_path: str | Path,
    revision: str | None = None,
    cache: str | None = None,
    weights: str = "auto",
    ignore: Sequence[str] = (),
) -> Path:
    """The folder of a model: the local one, else a snapshot fetched from the hub.

    cache    folder that is downloaded to; the hub's own if None.
    weights  which kind to fetch, as for ``Checkpoint.open``, or none.
    ignore   patterns of files that are not fetched.

    Raises ``model_missing`` for something that looks like a path, ``model_hub`` when the hub could not deliver.
    """
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if name.strip() and os.path.isdir(path):  # which, other than the path's own method, minds no name however long
        return path
    if os.path.lexists(path) or not name.strip():
        raise error("model_missing", path=name)
    if not _HUB_NAME.fullmatch(name) or name.endswith((".", "-")) or ".." in name:
        raise error("model_missing", path=name)
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=cache,
            allow_patterns=[*_hub_weights(name, revision, weights), *_HUB_REST],
            ignore_patterns=["*/*", *ignore],
        )
    except Exception as problem:
        # The hub client raises many kinds (HTTP, offline, validation, disk); the first line says which.
        lines = str(problem).strip().splitlines()
        reason = (lines[0] if lines else type(problem).__name__).rstrip(".")
        raise error("model_hub", name=name, reason=reason) from problem
    return Path(folder)


def _hub_weights(name: str, revision: str | None, weights: str) -> list[str]:
    """Which weights to fetch of a repository."""
    known: dict[str, list[str]] = {"none": [], "safetensors": _HUB_SAFETENSORS, "pt": _HUB_TORCH}
    if weights in known:
        return known[weights]
    import huggingface_hub

    try:
        siblings = huggingface_hub.HfApi().model_info(name, revision=revision).siblings or []
    except Exception:
        # Offline, or unreachable: what is in the cache is all there is, and the download says what is wrong.
        return _HUB_SAFETENSORS + (_HUB_TORCH if huggingface_hub.constants.HF_HUB_OFFLINE else [])
    files = [sibling.rfilename for sibling in siblings if "/" not in sibling.rfilename]
    return _HUB_SAFETENSORS if any(file.endswith(".safetensors") for file in files) else _HUB_TORCH


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


def read_spec(folder: Path, config: dict[str, Any]) -> QuantSpec | None:
    """How the model in ``folder`` is quantized, or None: config.json says so, or a file of older tools beside it.

    Raises ``format_unsupported``.
    """
    found = config.get("quantization_config")
    if found is None:
        for file, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
            if (folder / file).is_file():
                found = {"quant_method": method, **read_json(folder / file, file)}
                break
    return quantization_config.read(found) if found else None


class Checkpoint:
    """A model folder whose headers were read and checked; tensors are mapped in when asked for."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self.inventory: dict[str, TensorInfo] = {}
        self._handles: dict[str, Any] = {}

    @classmethod
    def open(
        cls,
        path: str | Path,
        weights: str = "auto",
        ignore: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Read config.json and every shard's header.

        weights  safetensors or pt read only one kind; auto reads torch's files where there are no safetensors.
        ignore   patterns of weight files that are not read.
        config   what holds instead of config.json.

        Raises ``model_missing``, ``model_incomplete``, ``model_malformed``, ``pickle_refused``, ``path_outside_model``.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise error("model_missing", path=str(path))
        if config is None and not (folder / "config.json").exists():
            missing = "it is an unfinished write by aiakq" if PARTIAL_MARK in folder.name else "config.json is missing"
            raise error("model_incomplete", path=str(path), missing=missing)
        if config is None:
            config = read_json(folder / "config.json", str(folder / "config.json"))
        shards = _shard_files(folder, weights, ignore)
        _check_manifest(folder, config)
        checkpoint = cls(folder, dict(config))
        inventory = checkpoint.inventory
        for file, listed in shards.items():
            found = checkpoint._header(file)
            for name, info in found.items():
                # A tensor may be in a second shard too; the index says which one counts.
                if listed is None or name in listed:
                    if name in inventory:
                        raise error("model_malformed", file=file, reason=f"tensor {name} is in two files")
                    inventory[name] = info
            absent = sorted(set(listed or ()) - set(found))
            if absent:
                raise error(
                    "model_incomplete",
                    path=str(path),
                    missing=f"{file} does not hold {_some(absent)} as its index says",
                )
        if not inventory:
            raise error("model_incomplete", path=str(path), missing="it holds no tensor")
        return checkpoint

    @cached_property
    def spec(self) -> QuantSpec | None:
        """How the checkpoint is quantized, or None. Raises ``format_unsupported``."""
        return read_spec(self.path, self.config)

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU, mapped from its file. KeyError for a name outside the inventory."""
        info = self.inventory[name]
        handle = self._handles.get(info.file)
        if handle is None:
            handle = self._handles[info.file] = self._open(info.file)
        return handle[name] if isinstance(handle, dict) else handle.get_tensor(name)

    def _header(self, file: str) -> dict[str, TensorInfo]:
        """What one file holds, without reading a weight."""
        if not file.endswith(".bin"):
            return read_header(_inside(self.path, file), file)
        tensors = self._handles[file] = self._open(file)
        return describe(tensors, file)

    def _open(self, file: str) -> Any:
        """A handle on one file: a dictionary of mapped tensors, or the safetensors package's own."""
        path = _inside(self.path, file)
        if file.endswith(".bin"):
            return read_torch_file(path, file)
        try:
            return safetensors.safe_open(path, framework="pt", device="cpu")
        except (OSError, safetensors.SafetensorError) as problem:
            raise error("model_malformed", file=file, reason=str(problem)) from None

    def names(self, prefix: str) -> Iterator[str]:
        """The tensors whose name starts with ``prefix``."""
        return (name for name in self.inventory if name.startswith(prefix))

    @cached_property
    def _linears(self) -> list[str]:
        found = []
        for name, info in self.inventory.items():
            prefix, _, suffix = name.rpartition(".")
            packed = suffix in ("qweight", "weight_packed")
            if packed or (suffix == "weight" and info.dtype == "I8" and f"{prefix}.weight_scale" in self.inventory):
                found.append(prefix)
        return sorted(found)

    def locate(self, name: str) -> str | None:
        """The tensor that a model calls ``name``: files may lack the outermost ``model.``, or have one more."""
        return next((each for each in _spellings(name) if each in self.inventory), None)

    def locate_linear(self, name: str) -> str | None:
        """The quantized linear that a model calls ``name``; see ``locate``."""
        return next((each for each in _spellings(name) if each in self._linear_set), None)

    @cached_property
    def _linear_set(self) -> frozenset[str]:
        return frozenset(self._linears)

    def quantized_linears(self) -> list[str]:
        """The modules that own quantized weights, by what is in the files, whatever the config says."""
        return list(self._linears)

    def layout(self, prefix: str) -> str:
        """The format of the quantized linear ``prefix``: what its tensors look like, else what the config says."""
        assert self.spec is not None, "an unquantized checkpoint has no quantized linears"
        infos = {suffix: self.inventory[name] for suffix, name in self._suffixes(prefix).items()}
        half_words = "qweight" in infos and infos["qweight"].dtype == "I16"
        return formats.layout_of({suffix: info.shape for suffix, info in infos.items()}, half_words, self.spec.format)

    def _suffixes(self, prefix: str) -> dict[str, str]:
        names = {suffix: f"{prefix}.{suffix}" for suffix in formats.all_suffixes()}
        return {suffix: name for suffix, name in names.items() if name in self.inventory}

    def linear_tensors(self, prefix: str) -> dict[str, str]:
        """suffix -> full name of the tensors that the quantized linear ``prefix`` owns."""
        suffixes = formats.load(self.layout(prefix)).SUFFIXES
        return {suffix: name for suffix, name in self._suffixes(prefix).items() if suffix in suffixes}

    def linear_spec(self, prefix: str) -> QuantSpec:
        """The spec of one quantized linear, in the layout its tensors have.

        What is in the file counts, even where the config says that this linear is not quantized.
        """
        assert self.spec is not None, "an unquantized checkpoint has no quantized linears"
        spec = self.spec.for_layer(prefix) or replace(self.spec, layers=())
        return replace(spec, format=self.layout(prefix))

    def read_linear(self, prefix: str) -> QWeight:
        """One quantized linear, bias included. Raises ``tensor_mismatch`` and ``not_finite`` naming the tensor."""
        tensors = {suffix: self.tensor(name) for suffix, name in self.linear_tensors(prefix).items()}
        spec = self.linear_spec(prefix)
        try:
            return formats.load(spec.format).read(tensors, spec, prefix)
        except AiakqError as problem:
            if problem.id == "tensor_mismatch":
                raise error("tensor_mismatch", **{**problem.fields, "path": str(self.path)}) from None
            raise

    def close(self) -> None:
        """Drop the file handles; tensors already handed out stay valid."""
        self._handles.clear()


def _spellings(name: str) -> tuple[str, ...]:
    return name, name.removeprefix("model."), f"model.{name}"


def _shard_files(folder: Path, weights: str, ignore: Sequence[str]) -> dict[str, frozenset[str] | None]:
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
        raise error("model_incomplete", path=str(folder), missing=f"{_some(absent)} of its index")
    return {
        file: frozenset(names)
        for file, names in sorted(shards.items())
        if not any(fnmatchcase(file, pattern) for pattern in ignore)
    }


def _inside(folder: Path, file: str) -> Path:
    """The real path of a shard, which must stay in the folder or in the hub cache the folder belongs to."""
    real = Path(os.path.realpath(folder / file))
    roots = [Path(os.path.realpath(folder))]
    # The hub cache links snapshots/<revision>/<file> to blobs/<hash>.
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise error("path_outside_model", path=str(folder), file=file)
    return real


def _check_manifest(folder: Path, config: Mapping[str, Any]) -> None:
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


def _some(names: list[str]) -> str:
    """At most five names of a list, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
