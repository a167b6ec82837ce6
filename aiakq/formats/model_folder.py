"""Files of a model folder: JSON files, shard index, manifest, and weight shards.

Nothing in the folder is executed, and no path may leave it: files are opened by ``open_file``, and files that other
packages open are checked by ``check_files`` first.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from aiakq.errors import AiakqError, error
from aiakq.system.files import IS_LFS_POINTER, LFS_POINTER

MANIFEST = "aiakq_manifest.json"
#: What was folded into the linear layers (folded_scales.py), and where config.json names it, under ``aiakq``.
FOLDED_SCALES = "aiakq/folded_scales.safetensors"
FOLDED_SCALES_KEY = "folded_scales"
#: Where config.json says, under ``aiakq``, how the weights were rotated.
ROTATION_KEY = "rotation"
#: Where config.json says, under ``aiakq``, what a checkpoint was made from that was quantized already.
SOURCE_KEY = "source"
#: Methods that scale the inputs of layers.
SCALING_METHODS = ("awq", "smooth_quant")
#: Part of the name of every folder that is still being written.
PARTIAL_MARK = ".aiakq-partial-"
#: The index file of safetensors shards.
INDEX = "model.safetensors.index.json"
#: Size limit of files that are read whole, which all except weights are. The largest real tokenizer.json is under 40
#: MiB.
MAX_FILE_BYTES = 64 << 20
#: Files of a source folder that define tokenization or license terms; copied byte for byte.
VERBATIM_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "artifact.metadata",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
)
#: Names of files that transformers may open when it loads a config, a tokenizer or a model.
_OPENED_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "*.vocab",
    "*.bpe",
    "*.spm",
    "*.py",
)
#: Those that may exceed ``MAX_FILE_BYTES`` because nothing reads them: logs of a trainer.
_UNREAD_FILES = ("trainer_*.json", "*_results.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
#: Typical files of model folders on the hub, which ``--overwrite`` may delete.
_MODEL_FILES = (
    *("config.json", "*_config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*", "gptq_model*"),
    *("tokenizer*", "tokenization_*.py", "configuration_*.py", "modeling_*.py", "*.tiktoken", "chat_template*"),
    *("aiakq_report.*", "recipe.yaml", "README.md", "LICENSE*", "NOTICE*", ".gitattributes", ".gitignore"),
)
#: Module folders of sentence-transformers inside a model folder, their files, and the maximum size of these.
_MODULE_FOLDER = re.compile(r"[0-9]{1,2}_[A-Z][A-Za-z]{1,30}")
_MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
MAX_MODULE_BYTES = 1 << 30
_MODEL_FOLDERS = ("additional_chat_templates", "aiakq", ".cache")
#: The only folder inside a model folder from which transformers reads.
_TEMPLATE_FOLDER = "additional_chat_templates"
#: Names of files in a hub cache: SHA-1 of git, or SHA-256 of large files.
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def real_path(folder: Path, file: str) -> Path:
    """Return the real path of a file, which must stay in the folder, or be a file of a hub cache.

    A hub cache stores files as ``models--<name>/blobs/<hash>``. Its own snapshots link to them, and folders that ``hf
    download`` made before huggingface_hub 0.23. Raises ``path_outside_model``, or ``broken_link`` for a link that leads
    nowhere.
    """
    try:
        real = Path(os.path.realpath(folder / file))
    except (OSError, ValueError):  # a loop of links, a zero byte
        if problem := link_problem(folder / file):
            raise error("broken_link", path=str(folder), file=file, problem=problem) from None
        raise error("path_outside_model", path=str(folder), file=file) from None
    root = Path(os.path.realpath(folder))
    inside = real.is_relative_to(root)
    if root.parent.name == "snapshots":
        inside = inside or real.is_relative_to(root.parent.parent / "blobs")
    if not inside and not _is_blob(real):
        linked = os.path.islink(folder / file)
        if problem := link_problem(folder / file):
            raise error("broken_link", path=str(folder), file=file, problem=problem)
        raise error("path_outside_model", path=str(folder), file=f"{file} -> {real}" if linked else file)
    return real


def _is_blob(path: Path) -> bool:
    """Whether ``path``, without links, is a file of a hub cache."""
    repository = path.parent.parent.name
    return path.parent.name == "blobs" and repository.startswith("models--") and _BLOB.fullmatch(path.name) is not None


def link_problem(path: Path) -> str | None:
    """Return where a link leads, if that does not exist; None for anything else."""
    try:
        there = os.readlink(path)
        os.stat(path)
    except (OSError, ValueError) as problem:
        if not os.path.islink(path):
            return None
        is_loop = isinstance(problem, OSError) and problem.errno == errno.ELOOP
        return "a link in a loop of links" if is_loop else f"a link to '{there:.200}', which does not exist"
    return None


def open_regular(path: Path, bad: Callable[[str], AiakqError]) -> BinaryIO:
    """Open a regular file; anything else raises ``bad(reason)``. ``path`` comes from ``real_path``."""
    # O_NONBLOCK: opening a named pipe must not wait for a writer.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        raise (_system_error(problem, path) or bad(problem.strerror or str(problem))) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):  # checked before fdopen, which fails for a folder
        os.close(descriptor)
        raise bad("it is a folder, not a regular file" if stat.S_ISDIR(mode) else "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def _system_error(problem: OSError, path: Path) -> AiakqError | None:
    """Return the error for a failure of the machine rather than the file; None for any other failure."""
    if problem.errno in (errno.EMFILE, errno.ENFILE):
        return error("open_files")
    if problem.errno == errno.EIO:
        return error("disk_failed", path=path, reason=problem.strerror)
    return None


def read_error(problem: OSError, path: Path) -> AiakqError:
    """Return the error for a file of a model folder that cannot be read."""
    bad = error("model_malformed", file=path.name, reason=problem.strerror or str(problem))
    return _system_error(problem, path) or bad


def open_file(folder: Path, file: str, shown: str | None = None) -> BinaryIO:
    """Open a file of a model folder for reading; ``shown`` is its name in messages.

    Raises ``path_outside_model`` for a link that leaves the folder, ``broken_link`` for one that leads nowhere,
    ``model_malformed`` if it is not a regular file.
    """

    def bad(reason: str) -> AiakqError:
        return error("model_malformed", file=shown or file, reason=reason)

    real = real_path(folder, file)
    if problem := link_problem(folder / file):
        raise error("broken_link", path=str(folder), file=shown or file, problem=problem)
    return open_regular(real, bad)


def read_file(folder: Path, file: str, shown: str | None = None, limit: int | None = None) -> bytes:
    """Return the content of a file in a model folder, at most ``limit`` bytes (MAX_FILE_BYTES); see ``open_file``."""
    limit = limit or MAX_FILE_BYTES
    with open_file(folder, file, shown) as stream:
        try:
            content = stream.read(limit + 1)
        except OSError as problem:
            bad = error("model_malformed", file=shown or file, reason=problem.strerror or str(problem))
            raise (_system_error(problem, folder / file) or bad) from None
    if len(content) > limit:
        raise _too_large(shown or file, limit)
    return content


def _too_large(file: str, limit: int = 0) -> AiakqError:
    return error("model_malformed", file=file, reason=f"it is larger than {(limit or MAX_FILE_BYTES) >> 20} MiB")


def file_identity(path: Path | int) -> tuple[int, int, int, int] | None:
    """Return device, inode, size and modification time of a file, which change when it is written or replaced.

    path  path or file descriptor.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def folder_identity(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return ``file_identity`` of every file that affects what a model computes: configs, weights, tokenizer."""
    patterns = (*_OPENED_FILES, "*.safetensors")
    names = [name for name in _names(folder) if any(fnmatchcase(name, pattern) for pattern in patterns)]
    identities = {name: file_identity(folder / name) for name in names}
    return {name: identity for name, identity in identities.items() if identity is not None}


def file_sizes(folder: Path) -> dict[str, int]:
    """Return name and size of every file covered by ``folder_identity``: equal for copies of a folder."""
    return {name: size for name, (_, _, size, _) in sorted(folder_identity(folder).items())}


def read_json(path: Path, file: str) -> dict[str, Any]:
    """Read a JSON object from a file of a model folder. Raises like ``read_file``, naming ``file``."""
    content = read_file(path.parent, path.name, file)
    if content.startswith(LFS_POINTER):
        raise error("model_malformed", file=file, reason=IS_LFS_POINTER)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise error("model_malformed", file=file, reason=f"it is not JSON ({problem})") from None
    if not isinstance(value, dict):
        raise error("model_malformed", file=file, reason="it is not a JSON object")
    return value


def first_architecture(config: Mapping[str, object]) -> str:
    """Return the first architecture of config.json, ``unnamed`` without one. Raises ``model_malformed``."""
    names = config.get("architectures") or ["unnamed"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise error("model_malformed", file="config.json", reason="architectures is no list of names")
    return names[0]


def module_files(folder: Path) -> list[str]:
    """Return the files in module folders of sentence-transformers, like 1_Pooling/config.json, sorted."""
    if not (folder / "modules.json").exists():
        return []
    inside = [name for name in _names(folder) if _MODULE_FOLDER.fullmatch(name) and (folder / name).is_dir()]
    files = (f"{name}/{file}" for name in inside for file in _MODULE_FILES)
    return [name for name in files if (folder / name).is_file()]


#: The file of a named template; a leading dot would hide it.
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}\.jinja")


def template_files(folder: Path) -> list[str]:
    """Return the files of named chat templates, like additional_chat_templates/tool_use.jinja, sorted. Those with names
    that no template has are left out.
    """
    names = (path.name for path in (folder / _TEMPLATE_FOLDER).glob("*.jinja"))
    return sorted(f"{_TEMPLATE_FOLDER}/{name}" for name in names if _TEMPLATE_NAME.fullmatch(name))


def vocabulary_files(folder: Path) -> list[str]:
    """Return the names of vocabulary files that a tokenizer's own code may read, like qwen.tiktoken, sorted."""
    return sorted(path.name for pattern in ("*.model", "*.model.v*", "*.tiktoken") for path in folder.glob(pattern))


def check_files(folder: str | Path) -> None:
    """Check every file that transformers may open in a model folder, and those that ``quantize`` copies.

    Each must be a regular file inside the folder (see ``real_path``) and not too large. Raises like ``read_file``.
    """
    folder = Path(folder)
    for name in _names(folder):
        if name in VERBATIM_FILES or any(fnmatchcase(name, pattern) for pattern in _OPENED_FILES):
            _check_file(folder, name)
    if os.path.lexists(folder / _TEMPLATE_FOLDER):
        if real_path(folder, _TEMPLATE_FOLDER) != Path(os.path.realpath(folder)) / _TEMPLATE_FOLDER:
            raise error("path_outside_model", path=str(folder), file=_TEMPLATE_FOLDER)
        for name in _names(folder / _TEMPLATE_FOLDER):
            _check_file(folder, f"{_TEMPLATE_FOLDER}/{name}")
    _check_named_files(folder)


def _names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted. Raises ``model_malformed`` if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as problem:
        bad = error("model_malformed", file=str(folder), reason=problem.strerror or str(problem))
        raise (_system_error(problem, folder) or bad) from None


def _check_file(folder: Path, name: str) -> None:
    with open_file(folder, name) as stream:
        unread = any(fnmatchcase(name, pattern) for pattern in _UNREAD_FILES)
        if os.fstat(stream.fileno()).st_size > MAX_FILE_BYTES and not unread:
            raise _too_large(name)


def _check_named_files(folder: Path) -> None:
    """Reject a tokenizer_config.json with paths of other files, which transformers would read instead."""
    if not os.path.lexists(folder / "tokenizer_config.json"):
        return
    for key, value in read_json(folder / "tokenizer_config.json", "tokenizer_config.json").items():
        if key.endswith("_file") and isinstance(value, str) and os.path.exists(value):
            real = Path(os.path.realpath(value))
            if not real.is_relative_to(os.path.realpath(folder)):
                raise error("path_outside_model", path=str(folder), file=value)


def check_manifest(folder: Path, config: Mapping[str, object]) -> None:
    """Reject a folder written by aiakq that is incomplete, or whose weights were truncated since."""
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
        # Only weights: users may edit a config or a template. Subfolders contain no shards.
        if not file.endswith(".safetensors") or "/" in file or not isinstance(entry, dict):
            continue
        real = folder / Path(file).name
        if not real.exists():
            raise error("model_incomplete", path=str(folder), missing=f"{file} of its manifest")
        if real.stat().st_size != entry.get("size"):
            raise error("model_malformed", file=file, reason="its size is not the one in the manifest")


def kept_reason(folder: Path) -> str | None:
    """Return why ``folder`` must not be deleted for another model; None if it contains a model and nothing else.

    A model is one written by aiakq, or a config.json with an architecture beside weights.
    """
    names = _names(folder)
    try:
        written = set(read_json(folder / MANIFEST, MANIFEST).get("files") or ()) | {MANIFEST}
    except (AiakqError, TypeError):
        written = set()
    if not written and not (_names_architecture(folder) and any(name.endswith(_WEIGHTS) for name in names)):
        return "holds files but no model"
    others = [name for name in names if not (name in written or _belongs_to_model(folder, name))]
    return f"also holds what belongs to no model ({some_of(others)})" if others else None


def _names_architecture(folder: Path) -> bool:
    try:
        config = read_json(folder / "config.json", "config.json")
    except AiakqError:
        return False
    return bool(config.get("architectures") or config.get("model_type"))


def _belongs_to_model(folder: Path, name: str) -> bool:
    if (folder / name).is_dir() and not (folder / name).is_symlink():
        return name in _MODEL_FOLDERS or _MODULE_FOLDER.fullmatch(name) is not None
    return name in VERBATIM_FILES or any(fnmatchcase(name, pattern) for pattern in _MODEL_FILES)


def some_of(names: list[str]) -> str:
    """Return at most five names of a list for a message, truncated and printable."""
    shown = (name if name.isprintable() else repr(name) for name in (f"{name:.200}" for name in names[:5]))
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def has_scaled_inputs(config: Mapping[str, object]) -> bool:
    """Whether config.json says that the model was made from one whose layers had scaled inputs."""
    own = config.get("aiakq")
    source = own.get(SOURCE_KEY) if isinstance(own, Mapping) else None
    return isinstance(own, Mapping) and (
        FOLDED_SCALES_KEY in own or (isinstance(source, Mapping) and source.get("method") in SCALING_METHODS)
    )
