"""The model folder of a GGUF file: config.json and the tokenizer's files, made from its metadata in a cache.

It is made once for each version of the file, see made_folder.py; ``gguf.json`` names the file with the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats.gguf.choice import MARK, gguf_of
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf_model import config_of
from aiakq.formats.gguf_model.keys import Metadata, unsupported
from aiakq.formats.gguf_model.tensors import ModelTensors as ModelTensors
from aiakq.formats.gguf_model.tokenizer import special_ids, tokenizer_files
from aiakq.formats.made_folder import GGUF, made_path, write_made

#: Changes whenever the files of a folder would be others.
_FORMAT = 2


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
        parts = [file.path.parent / name for name in file.files]
        folder = made_path(GGUF, file.path.stem, parts, _FORMAT)
        if not (folder / MARK).is_file():
            write_made(folder, GGUF, model_files(file))
    finally:
        file.close()
    return folder


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
