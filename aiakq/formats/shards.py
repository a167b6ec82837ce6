"""Which files of a model folder hold its weights: one file, the shards of an index, or a whole set of shards."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import INDEX, link_problem, read_json, some_of

if TYPE_CHECKING:
    from aiakq.formats.safetensors_file import TensorInfo

#: Names of an index; those of a variant such as fp16 have its name inside.
_INDEXES = ("*.safetensors.index.json", "*.safetensors.index.*.json")
_TORCH_INDEX = "pytorch_model.bin.index.json"
_TORCH_INDEXES = "pytorch_model.bin.index.*.json"
#: Files of a variant, such as fp16, that transformers reads only if asked for it.
_VARIANT = re.compile(
    r"(?:model|pytorch_model)\.(?:(?:safetensors|bin)\.index\.(?P<a>[^.]+)\.json"
    r"|(?P<b>[^.]+?)(?:-[0-9]+-of-[0-9]+)?\.(?:safetensors|bin))"
)
#: Names of torch's files that contain weights rather than a trainer's state.
_TORCH_FILES = ("pytorch_model*.bin", "gptq_model*.bin")
#: Files of weights that aiakq does not read, and whose they are.
_OTHER_WEIGHTS = {
    "*.gguf": "GGUF",
    "weights*.npz": "MLX",
    "*.onnx": "ONNX",
    "*.engine": "TensorRT",
    "tf_model.h5": "TensorFlow",
    "flax_model*.msgpack": "Flax",
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
#: Number of a shard, and of all of its set.
_NUMBERED = re.compile(r"(.*)-([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")
#: Files that repeat the weights under other names, as Mistral publishes them.
_COPIES = ("consolidated*.safetensors",)
_CONSOLIDATED_INDEX = "consolidated.safetensors.index.json"
#: File -> its tensors according to the index, or None without an index.
Shards = Mapping[str, frozenset[str] | None]


def shard_files(folder: Path, weights: str, ignore: Sequence[str]) -> Shards:
    """Return the files of weights to read.

    As in transformers, a file of the whole model precedes an index, and both precede a variant such as fp16, which is
    read if it is the only one. Without an index, shards are read if none of their set is missing.

    weights  safetensors or pt read only one kind; auto reads torch's files where there are no safetensors.
    ignore   patterns of files to ignore.

    Raises ``model_incomplete``, ``model_malformed``, ``path_outside_model``, ``format_unsupported`` and
    ``pickle_refused``.
    """

    def files(*patterns: str) -> list[str]:
        return _matching(folder, patterns, ignore)

    indexes = [INDEX] if os.path.lexists(folder / INDEX) else files(*_INDEXES)
    shards = files("*.safetensors")
    torch_indexes = [_TORCH_INDEX] if os.path.lexists(folder / _TORCH_INDEX) else files(_TORCH_INDEXES)
    torch_shards = files(*_TORCH_FILES)
    only_variants = all(map(variant_of, [*indexes, *shards]))
    if weights == "pt" or (weights == "auto" and only_variants and has_torch_files([*torch_indexes, *torch_shards])):
        indexes = shards = []
    if "model.safetensors" in shards:
        return {"model.safetensors": None}
    if len(indexes) == 1:
        return _indexed_files(folder, indexes[0], ".safetensors", ignore)
    if len(shards) == 1:
        return {shards[0]: None}
    if shards:
        return _whole_set(folder, shards, indexes)
    if weights == "safetensors":
        raise _no_weights(folder, "*.safetensors")
    if "pytorch_model.bin" in torch_shards:
        return {"pytorch_model.bin": None}
    if len(torch_indexes) == 1:
        return _indexed_files(folder, torch_indexes[0], ".bin", ignore)
    if len(torch_shards) == 1:
        return {torch_shards[0]: None}
    if torch_shards:
        _check_variants(folder, [*torch_indexes, *torch_shards])
        raise _no_index(folder, _TORCH_INDEX, torch_shards)
    for pattern, kind in _OTHER_WEIGHTS.items():
        if files(pattern):
            raise error("format_unsupported", reason=f"its weights are in {kind} files ({some_of(files(pattern))})")
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise error("pickle_refused", path=str(folder), reason="there is no safetensors file and no pytorch_model.bin")
    raise _no_weights(folder, "pytorch_model*.bin" if weights == "pt" else "*.safetensors")


def consolidated_files(folder: Path, ignore: Sequence[str]) -> Shards:
    """Return the files of weights of a model in Mistral's format: one file, those of an index, or a whole set.

    Raises ``model_incomplete`` and ``model_malformed``.
    """
    shards = _matching(folder, _COPIES, ignore)
    if "consolidated.safetensors" in shards:
        return {"consolidated.safetensors": None}
    if os.path.lexists(folder / _CONSOLIDATED_INDEX):
        return _indexed_files(folder, _CONSOLIDATED_INDEX, ".safetensors", ignore)
    if not shards:
        raise _no_weights(folder, _COPIES[0])
    return _whole_set(folder, shards, ())


def unread_files(folder: Path, shards: Collection[str], ignore: Sequence[str]) -> list[str]:
    """Return the safetensors files beside ``shards`` that are not read, apart from known copies of the weights."""
    if not all(file.endswith(".safetensors") for file in shards):
        return []
    others = set(_matching(folder, ("*.safetensors",), ignore)) - set(shards)
    return sorted(name for name in others if not any(fnmatchcase(name, pattern) for pattern in _COPIES))


def describe_unread(unread: Sequence[str], shards: Shards) -> str:
    """Return a remark about files beside ``shards`` that are not read."""
    reason = "model.safetensors holds the model" if None in shards.values() else "the index does not name them"
    return f"files of weights that are not read, because {reason}: {some_of(list(unread))}"


def _matching(folder: Path, patterns: Sequence[str], ignore: Sequence[str]) -> list[str]:
    names = [path.name for pattern in patterns for path in sorted(folder.glob(pattern))]
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in ignore)]


def has_torch_files(names: Collection[str]) -> bool:
    """Whether ``names`` has a file or index of torch's that is not of a variant."""
    return "pytorch_model.bin" in names or _TORCH_INDEX in names


def variant_of(name: str) -> str:
    """Return the variant whose weights or index a file holds; "" if it is none."""
    match = _VARIANT.fullmatch(name)
    return "" if match is None else match["a"] or match["b"]


def _check_variants(folder: Path, names: Sequence[str]) -> None:
    """Raise ``model_incomplete`` if files hold several variants of the model, and nothing says which one is meant."""
    variants = {variant_of(name): name for name in sorted(names, key=len, reverse=True)}
    if len(variants) > 1 and "" not in variants:
        given = f"no weights without the name of a variant, but {some_of(sorted(variants.values()))}"
        missing = f"it holds {given}, of which all but one have to be removed, or left out with --ignore-patterns"
        raise error("model_incomplete", path=str(folder), missing=missing)


def _no_weights(folder: Path, pattern: str) -> AiakqError:
    """Return the error for a folder without files like ``pattern``, naming one that has nearly such a name."""
    near = [path.name for path in sorted(folder.iterdir()) if ".safetensor" in path.name.lower()]
    near = [name for name in near if not name.endswith(".json")]
    missing = f"it holds no {pattern}" + (f", and {some_of(near)} would have to be renamed" if near else "")
    return error("model_incomplete", path=str(folder), missing=missing)


def _no_index(folder: Path, index: str, shards: Sequence[str]) -> AiakqError:
    missing = (
        f"{index} is missing, which says which of its {len(shards)} files hold the model ({some_of(list(shards))})"
    )
    return error("model_incomplete", path=str(folder), missing=missing)


def _whole_set(folder: Path, shards: Sequence[str], indexes: Sequence[str]) -> Shards:
    """Return the shards if they are numbered and none is missing. Raises ``model_incomplete``."""
    _check_variants(folder, [*indexes, *shards])
    numbered = [_NUMBERED.fullmatch(name) for name in shards]
    sets = {(match[1], match[3]) for match in numbered if match is not None}
    if indexes or None in numbered or len(sets) != 1:
        raise _no_index(folder, INDEX, shards)
    [(stem, count)] = sets
    if int(count) > len(shards):
        there = {int(match[2]) for match in numbered if match is not None}
        absent = next(number for number in range(1, int(count) + 1) if number not in there)
        missing = f"{stem}-{absent:0{len(count)}}-of-{count}.safetensors is missing, and so is {INDEX}"
        raise error("model_incomplete", path=str(folder), missing=missing)
    return dict.fromkeys(shards)


def _indexed_files(folder: Path, index: str, ending: str, ignore: Sequence[str]) -> Shards:
    """Return the files named by an index, with their tensors."""
    weight_map = read_json(folder / index, index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise error("model_malformed", file=index, reason="it has no weight_map of names to files")
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, set()).add(name)
    shards: dict[str, set[str]] = {}
    for file, listed in names.items():
        shards.setdefault(_file_of_index(folder, index, file, ending), set()).update(listed)
    absent = sorted(file for file in shards if not os.path.exists(folder / file))  # accepts names of any length
    if absent:
        raise error("model_incomplete", path=str(folder), missing=_why_absent(folder, absent))
    return {
        file: frozenset(listed)
        for file, listed in sorted(shards.items())
        if not any(fnmatchcase(file, pattern) for pattern in ignore)
    }


def _file_of_index(folder: Path, index: str, file: str, ending: str) -> str:
    """Return the path inside ``folder`` of a file that an index names, possibly as ``./x`` or an absolute path.

    Raises ``path_outside_model`` for one that leaves the folder, ``model_malformed`` for one that is no such file.
    """
    root = os.path.abspath(folder)
    path = os.path.normpath(os.path.join(root, file)) if "\0" not in file else ""
    if not path.startswith(root + os.sep):
        raise error("path_outside_model", path=str(folder), file=file)
    if not path.endswith(ending):
        reason = f"it names {file!r:.200}, which does not end in {ending}"
        raise error("model_malformed", file=index, reason=reason)
    return os.path.relpath(path, root)


def _why_absent(folder: Path, absent: list[str]) -> str:
    """Describe files that an index names and that cannot be opened."""
    if problem := link_problem(folder / absent[0]):
        return f"{some_of(absent[:1])} of its index is {problem}"
    lower = {path.name.lower(): path.name for path in folder.iterdir()}
    near = lower.get(absent[0].lower())
    renamed = f", unless {near:.200} is meant, which would have to be renamed" if near else ""
    return f"{some_of(absent)} of its index {'is' if len(absent) == 1 else 'are'} missing{renamed}"


def shard_header(path: Path, file: str) -> dict[str, TensorInfo]:
    """Return name -> header of the tensors of the shard at ``path``, which messages call ``file``."""
    from aiakq.formats.safetensors_file import read_header  # imported late, because of torch
    from aiakq.formats.torch_file import read_torch_file

    return (read_torch_file if file.endswith(".bin") else read_header)(path, file)
