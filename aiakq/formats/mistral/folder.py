"""The model folder that is made from one in Mistral's format, with config.json and the tokenizer (made_folder.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiakq.errors import error
from aiakq.formats.made_folder import MISTRAL, made_path, mark_of, write_made
from aiakq.formats.mistral.choice import WEIGHTS, tokenizer_file
from aiakq.formats.mistral.params import PARAMS, config_of
from aiakq.formats.mistral.tensors import hf_names, quantization_config
from aiakq.formats.model_folder import read_file, read_json, real_path
from aiakq.formats.safetensors_file import read_header
from aiakq.formats.shards import consolidated_files

#: Changes whenever the files of a folder would be others.
_LAYOUT = 1
#: Ids of <s> and </s> in every vocabulary of SentencePiece that Mistral has published; the tokenizer checks them.
_BOS, _EOS = 1, 2
#: Files of such a folder that have the same meaning in Hugging Face's format.
_COPIED = ("generation_config.json", "LICENSE", "NOTICE")


def mistral_folder(folder: Path, with_weights: bool = True) -> Path:
    """Return the folder that is made from one in Mistral's format, which is written if there is none yet.

    with_weights  whether its files of weights are there, which say what is quantized.

    Raises what ``config_of``, ``hf_names`` and ``consolidated_files`` raise, ``model_incomplete`` without a
    params.json, and ``cache_unwritable``.
    """
    folder = folder.resolve()
    if not (folder / PARAMS).exists():
        raise error("model_incomplete", path=str(folder), missing=f"{PARAMS} is missing")
    tokenizer = tokenizer_file(folder)
    parts = [folder / PARAMS, *sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))]
    parts += [each for each in (tokenizer, *(folder / name for name in _COPIED)) if each is not None and each.exists()]
    made = made_path(MISTRAL, folder.name, parts, _LAYOUT)
    if not (made / mark_of(MISTRAL)).is_file():
        write_made(made, MISTRAL, _model_files(folder, tokenizer, with_weights))
    return made


def _model_files(folder: Path, tokenizer: Path | None, with_weights: bool) -> dict[str, Any]:
    """Return the contents of the files of the made folder, by name, with the mark last."""
    params = read_json(folder / PARAMS, PARAMS)
    config = config_of(params)
    quantization = params.get("quantization")
    if with_weights or quantization:
        stored = [
            name for file in consolidated_files(folder, ()) for name in read_header(real_path(folder, file), file)
        ]
        described = quantization_config(hf_names(stored), quantization)
        if described is not None:
            config["quantization_config"] = described
    files: dict[str, Any] = {}
    config |= {"bos_token_id": _BOS, "eos_token_id": _EOS}
    if tokenizer is not None:
        content = files[tokenizer.name] = read_file(folder, tokenizer.name)
        if tokenizer.suffix == ".json":
            config |= _end_ids(content, tokenizer.name)
    files |= {name: read_file(folder, name) for name in _COPIED if (folder / name).is_file()}
    return {"config.json": config, **files, mark_of(MISTRAL): {"file": str(folder)}}


def _end_ids(content: bytes, file: str) -> Mapping[str, int]:
    """Return the ids of <s> and </s> in a tekken.json. Raises ``model_malformed``."""
    try:
        listed = json.loads(content).get("special_tokens") or []
        ids = {str(token["token_str"]): int(token["rank"]) for token in listed}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise error("model_malformed", file=file, reason="it is not a tokenizer of Mistral's") from None
    # Files without a list have the tokens of the first versions.
    return {"bos_token_id": ids.get("<s>", _BOS), "eos_token_id": ids.get("</s>", _EOS)}
