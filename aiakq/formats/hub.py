"""Resolution of model names to local folders, fetched from the Hugging Face Hub or object storage if necessary."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiakq.errors import AiakqError, error, first_line
from aiakq.formats import object_storage
from aiakq.formats.gguf.choice import choose_file, is_gguf, local_file
from aiakq.formats.mistral.choice import TOKENIZERS, WEIGHTS, has_only_mistral, is_mistral_folder
from aiakq.formats.model_folder import FOLDED_SCALES, FOLDED_SCALES_KEY
from aiakq.formats.shards import has_torch_files, variant_of
from aiakq.system.network import answers
from aiakq.system.user_path import user_path

#: Files to download besides weights: config, tokenizer, templates.
_OTHER_FILES = ["*.json", "*.jinja", "*.txt", "*.model", *TOKENIZERS, "*.tiktoken", "*.py", "artifact.metadata"]
#: Weights; torch's own files only for repositories without safetensors, or if requested.
_SAFETENSORS = ["*.safetensors"]
_TORCH = ["pytorch_model*.bin"]
_KINDS: dict[str, list[str]] = {"none": [], "safetensors": _SAFETENSORS, "pt": _TORCH, "mistral": [*WEIGHTS]}
#: Folders of sentence-transformers' modules, which are small, and their files.
_MODULES = ("[0-9]*_Pooling", "[0-9]*_Dense", "[0-9]*_Normalize", "[0-9]*_MultiVectorMask")
_MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Quantization of a GGUF file after a name.
_QUANTIZATION = re.compile(r"[A-Za-z0-9][\w.-]*")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _silent(sentence: str) -> None:
    """Say nothing."""


#: Called with a sentence before the hub is asked, which may take a while. The command line sets it.
announce: Callable[[str], None] = _silent


def split_quantization(name: str) -> tuple[str, str]:
    """Return a name and the quantization of a GGUF file that follows it after a colon, as in org/name:Q4_K_M."""
    base, colon, quantization = name.rpartition(":")
    is_split = colon and _QUANTIZATION.fullmatch(quantization) and not os.path.lexists(user_path(name))
    return (base, quantization) if is_split else (name, "")


def check_model_name(name: str) -> None:
    """Raise ``model_is_file`` or ``model_missing`` for what is no folder, file, URL or possible name on the hub."""
    base, quantization = split_quantization(name)
    path = user_path(base)
    if object_storage.is_url(base) and not base.partition("://")[2].strip("/"):
        raise error("model_storage", name=name, reason="it names no folder; one is like s3://bucket/folder")
    if object_storage.is_url(base) or (base.strip() and os.path.isdir(path)):
        return
    if os.path.isfile(path):
        if is_gguf(path) and not quantization:
            return
        kind, hint = _kind_of_file(path)
        raise error("model_is_file", path=name, kind=kind, hint=hint)
    possible = _NAME.fullmatch(base) and not base.endswith((".", "-")) and ".." not in base
    if os.path.lexists(path) or not possible:
        raise error("model_missing", path=name)


def _kind_of_file(path: Path) -> tuple[str, str]:
    """Describe what kind of file this is, and what to pass instead."""
    folder = path.parent if (path.parent / "config.json").is_file() else None
    beside = (
        f"Give the folder that it is in: {folder}" if folder else "A model is a folder, with config.json beside it."
    )
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError:
        start = b""
    if start == b"GGUF":
        return "a GGUF file", "A file has one quantization: leave out what follows the colon."
    if path.suffix == ".safetensors":
        return "a file of safetensors", beside
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        return "a file of torch", beside
    if path.name == "config.json" or path.name.endswith(".index.json"):
        return "a file of JSON", beside
    return "a file", "Give a folder with config.json and *.safetensors, or a hub name (org/name)."


def resolve_model(
    name_or_path: str | Path,
    revision: str | None = None,
    cache: str | None = None,
    weights: str = "auto",
    ignore: Sequence[str] = (),
    token: str | None = None,
) -> Path:
    """Return the folder of a model: the local one, else a snapshot downloaded from object storage or the hub.

    That of a GGUF file, and of a model in Mistral's format only, holds its config and tokenizer. A quantization after
    a colon selects a GGUF file: FOLDER:Q4_K_M, org/name:Q4_K_M.

    cache    download folder; the hub client's own if None.
    weights  kind of weights to download, as for ``Checkpoint.open``, or none. mistral: a folder in both formats is
             read in Mistral's.
    ignore   patterns of files not to download.
    token    access token; None: the hub client's own, if any; empty: the hub client's own, which must exist.

    Raises what ``check_model_name`` raises, ``option_conflict`` for a revision in object storage, and ``model_hub`` or
    ``model_storage`` if they do not deliver it.
    """
    name = str(name_or_path)
    check_model_name(name)
    name, quantization = split_quantization(name)
    if object_storage.is_url(name):
        return _from_object_storage(name, revision, cache, weights, ignore, quantization)
    path = user_path(name)
    if os.path.isfile(path):
        return _gguf_folder(path)
    if os.path.isdir(path):  # unlike path.is_dir, accepts names of any length
        return _model_in(path, quantization, weights)
    if (sentence := what_is_here(name)) is not None:
        announce(sentence)
    folder, files = _from_hub(name, quantization, revision, cache, weights, ignore, token)
    return _model_in(folder, quantization, weights, files)


def _from_hub(
    name: str,
    quantization: str,
    revision: str | None,
    cache: str | None,
    weights: str,
    ignore: Sequence[str],
    token: str | None,
) -> tuple[Path, list[str]]:
    """Return the folder of a snapshot, and the patterns of weights that were downloaded; see ``resolve_model``."""
    import huggingface_hub

    access = True if token == "" else token
    options: dict[str, Any] = {"revision": revision, "cache_dir": cache, "token": access}
    if not hub_answers():  # what is in the cache can still be used
        options["local_files_only"] = True
        weights = weights if quantization or weights in ("none", "safetensors", "pt") else "safetensors"
    try:
        wanted = _weight_patterns(name, revision, weights, access, quantization)
        in_folders = any("/" in each for each in wanted)  # some repositories have a folder for each quantization
        folder = huggingface_hub.snapshot_download(
            name,
            allow_patterns=[*wanted, *_OTHER_FILES],
            ignore_patterns=[*([] if in_folders else ["*/*"]), *ignore],
            **options,
        )
        if inside := _files_in_folders(Path(folder)):
            commit = os.path.basename(folder)  # the newest commit may have changed meanwhile
            options["revision"] = commit if _COMMIT.fullmatch(commit) else revision
            huggingface_hub.snapshot_download(name, allow_patterns=inside, **options)
    except AiakqError:
        raise
    except Exception as problem:
        # The hub client raises many kinds (HTTP, offline, validation, disk); the first line tells which.
        if options.get("local_files_only"):
            reason = "it does not answer, and the model is not in the cache"
            raise error("model_hub", name=name, reason=reason) from None
        raise error("model_hub", name=name, reason=first_line(problem)) from problem
    return Path(folder), wanted


def _gguf_folder(path: Path) -> Path:
    from aiakq.formats.gguf_model.folder import gguf_folder  # imports torch

    return gguf_folder(path)


def _model_in(folder: Path, quantization: str, weights: str, files: Sequence[str] = ()) -> Path:
    """Return the folder itself, or that of the GGUF file in it, if there are no other weights or it is asked for.

    files  what was downloaded, if it was chosen among GGUF files.
    """
    chosen = [file for file in files if file.endswith(".gguf") and "*" not in file]
    if chosen:
        return _gguf_folder(folder / chosen[0])
    if weights == "mistral" or (is_mistral_folder(folder) and not quantization and weights not in ("gguf", "pt")):
        from aiakq.formats.mistral.folder import mistral_folder  # imports torch

        return mistral_folder(folder, with_weights=weights != "none")
    found = [path.name for path in folder.glob("*.gguf")]
    others = any(next(folder.glob(pattern), None) for pattern in (*_SAFETENSORS, *_TORCH))
    if not quantization and weights != "gguf" and (others or not found or weights in ("safetensors", "pt")):
        return folder
    return _gguf_folder(local_file(folder, quantization))


def _from_object_storage(
    url: str, revision: str | None, cache: str | None, weights: str, ignore: Sequence[str], quantization: str
) -> Path:
    """Return the folder of a model that ``url`` names; see ``resolve_model``."""
    if revision is not None:
        raise error(
            "option_conflict",
            option="--revision",
            other=f"the model {url}",
            reason="object storage has no revisions",
            hint="Leave --revision out.",
        )
    announce(f"Fetching {url}.")
    wanted = _patterns_of(weights, object_storage.names(url), quantization, url)
    folder = object_storage.fetch(url, cache, [*wanted, *_OTHER_FILES], ignore)
    return _model_in(folder, quantization, weights, wanted)


def is_on_hub(name: str) -> bool:
    """Whether a valid name of a model can only be one on the hub."""
    path = split_quantization(name)[0]
    return not object_storage.is_url(name) and not os.path.exists(user_path(path))


def hub_answers() -> bool:
    """Whether a connection to the hub can be opened; asked once, because the hub client retries for minutes.

    True if the client is offline anyway, and with a proxy, through which only the client can tell.
    """
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) or answers(constants.ENDPOINT)


def what_is_here(name: str) -> str | None:
    """Return a sentence about a name that is no folder, file or URL, with what is beside it; None for those."""
    path = user_path(split_quantization(name)[0])
    if object_storage.is_url(name) or os.path.isdir(path) or os.path.isfile(path):
        return None
    beside = path.parent
    if beside != Path(".") and os.path.isdir(beside):
        names = sorted(each.name for each in beside.iterdir() if not each.name.startswith("."))
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        return f"There is no folder {path} here; {beside} contains {listed or 'nothing'}. Looking on the hub."
    return f"There is no folder {path} here. Looking on the hub."


def _files_in_folders(folder: Path) -> list[str]:
    """Patterns of the files that belong to a downloaded model and are in folders inside its repository."""
    files = []
    if (folder / "modules.json").exists():
        files = [f"{kind}/{file}" for kind in _MODULES for file in _MODULE_FILES]
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # opening the checkpoint will report the error
        return files
    own = config.get("aiakq") if isinstance(config, dict) else None
    return [*files, FOLDED_SCALES] if isinstance(own, dict) and FOLDED_SCALES_KEY in own else files


def _weight_patterns(
    name: str, revision: str | None, weights: str, token: str | bool | None, quantization: str = ""
) -> list[str]:
    """Return the patterns of the weight files to download from a repository. Raises ``gguf_choice``."""
    if weights in _KINDS and not quantization:
        return _KINDS[weights]
    import huggingface_hub

    try:
        siblings = huggingface_hub.HfApi(token=token).model_info(name, revision=revision).siblings or []
    except Exception:
        # Offline or unreachable: use the cache, and let the download report the error.
        if quantization or weights == "gguf":
            return [f"*{quantization}*.gguf"]
        return _SAFETENSORS + (_TORCH if huggingface_hub.constants.HF_HUB_OFFLINE else [])
    files = [sibling.rfilename for sibling in siblings]
    return _patterns_of(weights, files, quantization, name)


def _patterns_of(weights: str, files: Sequence[str], quantization: str, name: str) -> list[str]:
    """Return the patterns of the weight files to download; ``files`` are the names of all. Raises ``gguf_choice``."""
    if weights in _KINDS and not quantization:
        return _KINDS[weights]
    own = [file for file in files if "/" not in file]
    is_gguf_only = any(file.endswith(".gguf") for file in own) and not any(
        file.endswith((".safetensors", ".bin")) for file in own
    )
    if quantization or weights == "gguf" or is_gguf_only:
        return choose_file(files, quantization, name)
    if has_only_mistral(own):
        return _KINDS["mistral"]
    safetensors = [file for file in own if file.endswith(".safetensors")]
    if all(map(variant_of, safetensors)) and has_torch_files(own):  # the local folder is read like this, too
        return _TORCH
    return _SAFETENSORS if safetensors else _TORCH
