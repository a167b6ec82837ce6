"""Resolution of model names to local folders, downloading from the Hugging Face Hub if necessary."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiakq.errors import error

#: Files to download besides weights: config, tokenizer, templates.
_OTHER_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
#: Weights; torch's own files only for repositories without safetensors, or if requested.
_SAFETENSORS = ["*.safetensors"]
_TORCH = ["pytorch_model*.bin"]
#: Folders of sentence-transformers' modules, which are small, and their files.
_MODULES = ("[0-9]*_Pooling", "[0-9]*_Dense", "[0-9]*_Normalize")
_MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(
    name_or_path: str | Path,
    revision: str | None = None,
    cache: str | None = None,
    weights: str = "auto",
    ignore: Sequence[str] = (),
    token: str | None = None,
) -> Path:
    """Return the folder of a model: the local one, else a snapshot downloaded from the hub.

    cache    download folder; the hub client's own if None.
    weights  kind of weights to download, as for ``Checkpoint.open``, or none.
    ignore   patterns of files not to download.
    token    access token; None: the hub client's own, if any; empty: the hub client's own, which must exist.

    Raises ``model_missing`` for a path that does not exist, ``model_hub`` if the hub does not deliver it.
    """
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if name.strip() and os.path.isdir(path):  # unlike path.is_dir, accepts names of any length
        return path
    if os.path.lexists(path) or not name.strip():
        raise error("model_missing", path=name)
    if not _NAME.fullmatch(name) or name.endswith((".", "-")) or ".." in name:
        raise error("model_missing", path=name)
    import huggingface_hub

    access = True if token == "" else token
    options: dict[str, Any] = {"revision": revision, "cache_dir": cache, "token": access}
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            allow_patterns=[*_weight_patterns(name, revision, weights, access), *_OTHER_FILES],
            ignore_patterns=["*/*", *ignore],
            **options,
        )
        if os.path.exists(os.path.join(folder, "modules.json")):
            modules = [f"{kind}/{file}" for kind in _MODULES for file in _MODULE_FILES]
            commit = os.path.basename(folder)  # the newest commit may have changed meanwhile
            options["revision"] = commit if _COMMIT.fullmatch(commit) else revision
            huggingface_hub.snapshot_download(name, allow_patterns=modules, **options)
    except Exception as problem:
        # The hub client raises many kinds (HTTP, offline, validation, disk); the first line tells which.
        lines = str(problem).strip().splitlines()
        reason = (lines[0] if lines else type(problem).__name__).rstrip(".")
        raise error("model_hub", name=name, reason=reason) from problem
    return Path(folder)


def _weight_patterns(name: str, revision: str | None, weights: str, token: str | bool | None) -> list[str]:
    """Return the patterns of the weight files to download from a repository."""
    known: dict[str, list[str]] = {"none": [], "safetensors": _SAFETENSORS, "pt": _TORCH}
    if weights in known:
        return known[weights]
    import huggingface_hub

    try:
        siblings = huggingface_hub.HfApi(token=token).model_info(name, revision=revision).siblings or []
    except Exception:
        # Offline or unreachable: use the cache, and let the download report the error.
        return _SAFETENSORS + (_TORCH if huggingface_hub.constants.HF_HUB_OFFLINE else [])
    files = [sibling.rfilename for sibling in siblings if "/" not in sibling.rfilename]
    return _SAFETENSORS if any(file.endswith(".safetensors") for file in files) else _TORCH
