"""The model folder of a GGUF file: config.json and the tokenizer's files, made from its metadata in a cache.

Everything that loads a model expects a folder. That of a GGUF file holds what its metadata says in the words of Hugging
Face, a few MiB, and ``gguf.json``, which names the file with the tensors. It is made once for each version of the file:
its name is a hash of path, size and time. Nothing else writes there, so a folder elsewhere cannot name files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf_model import config_of
from aiakq.formats.gguf_model.keys import Metadata, unsupported
from aiakq.formats.gguf_model.tensors import ModelTensors as ModelTensors
from aiakq.formats.gguf_model.tokenizer import special_ids, tokenizer_files
from aiakq.formats.model_folder import read_json

#: Names the GGUF file, in a folder that ``gguf_folder`` made.
MARK = "gguf.json"
#: Changes whenever the files of a folder would be others.
_FORMAT = 2
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})")
#: Files beside models: projectors of images, and statistics of calibration.
_NO_MODEL = re.compile(r"(mmproj|mtp)[-_].*|.*[-_.](imatrix|mmproj)([-_.].*)?", re.IGNORECASE)
#: Most entries that a message lists.
_SHOWN = 12


# --- which file -------------------------------------------------------------------------------------------------------


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def quantization_label(name: str) -> str:
    """Return the end of a file's name that says how it is quantized, like Q4_K_M; else the whole name."""
    stem = re.sub(r"\.gguf$", "", name.rpartition("/")[2], flags=re.IGNORECASE)
    match = _PART.fullmatch(stem)
    stem = match["stem"] if match else stem
    found = re.search(
        r"(?:^|[-_.])((?:UD-)?(?:I?Q[1-9](?:_[A-Z0-9]+)*|TQ[1-9]_[0-9]|MXFP4(?:_MOE)?|BF16|F16|F32))$",
        stem,
        re.IGNORECASE,
    )
    return found[1] if found else stem


def choose_file(names: Sequence[str], wanted: str, source: str) -> list[str]:
    """Return the GGUF file among ``names`` whose quantization is ``wanted``, or the only one if that is empty, with all
    of its parts. Raises ``gguf_choice``.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        stem = re.sub(r"\.gguf$", "", name)
        match = _PART.fullmatch(stem)
        if name.endswith(".gguf") and not _NO_MODEL.fullmatch(stem.rpartition("/")[2]):
            models.setdefault(match["stem"] if match else stem, []).append(name)
    labels = {stem: quantization_label(stem + ".gguf") for stem in models}
    found = [
        stem
        for stem in models
        if not wanted or labels[stem].lower() == wanted.lower() or stem.lower().endswith(f"-{wanted.lower()}")
    ]
    if len(found) == 1:
        return models[found[0]]
    listed = sorted(labels[stem] for stem in (found or models))
    shown = ", ".join(listed[:_SHOWN]) + (", ..." if len(listed) > _SHOWN else "") or "none"
    asked = f" that is {wanted}" if wanted else ""
    problem = f"has no GGUF file{asked}" if not found else f"has {len(found)} GGUF files{asked}"
    raise error(
        "gguf_choice",
        path=source,
        problem=problem,
        found=shown,
        example=f"{source}:{listed[0] if listed else 'Q4_K_M'}",
    )


def local_file(folder: Path, wanted: str) -> Path:
    """Return the GGUF file of a folder whose quantization is ``wanted``; see ``choose_file``."""
    names = [path.name for path in folder.glob("*.gguf")]
    return folder / choose_file(names, wanted, str(folder))[0]


# --- its folder -------------------------------------------------------------------------------------------------------


def cache_root() -> Path:
    """Return where the folders of GGUF files are."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "aiakq" / "gguf"


def gguf_of(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that ``gguf_folder`` made; None for others. Raises ``model_malformed``."""
    if not (folder / MARK).is_file() or folder.resolve().parent != cache_root().resolve():
        return None
    path = read_json(folder / MARK, MARK).get("file")
    if not isinstance(path, str):
        raise error("model_malformed", file=MARK, reason="it names no file")
    return Path(path)


def tensors_of(folder: Path, config: Mapping[str, Any]) -> ModelTensors | None:
    """Return the tensors of the GGUF file of a folder that ``gguf_folder`` made; None for others.

    Raises what ``GGUFFile.open`` and ``ModelTensors.of`` raise.
    """
    path = gguf_of(folder)
    return None if path is None else ModelTensors.of(GGUFFile.open(path), config)


def gguf_folder(path: Path) -> Path:
    """Return the model folder of a GGUF file, which is made if there is none yet.

    Raises what ``GGUFFile.open``, ``config_of`` raise, and ``cache_unwritable``.
    """
    file = GGUFFile.open(path.resolve())
    try:
        folder = cache_root() / _folder_name(file)
        if not (folder / MARK).is_file():
            _write(folder, model_files(file))
    finally:
        file.close()
    return folder


def missing_tokenizer(folder: Path) -> AiakqError | None:
    """Return why a folder of a GGUF file has no tokenizer; None if it has one, and for other folders."""
    if gguf_of(folder) is None:
        return None
    reason = read_json(folder / MARK, MARK).get("no_tokenizer")
    return unsupported(reason) if isinstance(reason, str) else None


def model_files(file: GGUFFile) -> dict[str, Any]:
    """Return the contents of the files of a model folder, by name, with MARK last. Raises as ``config_of``."""
    keys = Metadata(file.metadata, file.path.name)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = config_of(keys, shapes, lambda name: _floats(file, name))
    config |= special_ids(keys)
    if (quantization := ModelTensors.of(file, config).quantization_config()) is not None:
        config["quantization_config"] = quantization
    mark: dict[str, Any] = {"file": str(file.path)}
    try:
        files = tokenizer_files(keys)
    except AiakqError as problem:
        if problem.id != "gguf_unsupported":
            raise
        files, mark["no_tokenizer"] = {}, problem.fields["reason"]
    else:
        _check_size(keys, files["tokenizer.json"], config["vocab_size"])
        config["eos_token_id"] = files["generation_config.json"]["eos_token_id"] or config.get("eos_token_id")
    return {"config.json": config, **files, MARK: mark}


def _check_size(keys: Metadata, tokenizer: Mapping[str, Any], rows: int) -> None:
    """Raise ``model_malformed`` for more tokens than the embedding has rows."""
    count = max(tokenizer["model"]["vocab"].values(), default=-1) + 1
    if count > rows:
        raise keys.malformed(
            "tokenizer.ggml.tokens", f"a list of {count}", f"one of at most {rows}, the embedding's rows"
        )


def _floats(file: GGUFFile, name: str) -> Tensor:
    """Return a tensor of factors, which are float32. Raises ``gguf_unsupported`` for other kinds."""
    import torch

    tensor = file.tensors[name]
    if tensor.kind.name != "F32":
        raise unsupported(f"{name} is of the kind {tensor.kind.name}, not F32")
    return file.read(name).contiguous().view(torch.float32).reshape(tensor.shape)


def _folder_name(file: GGUFFile) -> str:
    parts = [file.path.parent / name for name in file.files]
    stats = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    digest = hashlib.sha256(json.dumps([_FORMAT, version("aiakq"), stats]).encode()).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", file.path.stem)[:80]
    return f"{stem}-{digest[:16]}"


def _write(folder: Path, files: Mapping[str, Any]) -> None:
    """Write the files of a folder, which appears with all of them at once."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        try:
            for name, content in files.items():
                text = json.dumps(content, ensure_ascii=False, indent=1 if name != "tokenizer.json" else None)
                (partial / name).write_text(text, encoding="utf-8", errors="surrogatepass")
            os.replace(partial, folder)
        except OSError:
            if not (folder / MARK).is_file():  # another process was faster
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as problem:
        raise error("cache_unwritable", path=str(folder.parent), reason=problem.strerror or str(problem)) from None
