"""Whether a folder is in Mistral's format, and which of its files is the tokenizer. Without torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from aiakq.formats.made_folder import MISTRAL, source_of
from aiakq.formats.mistral.params import PARAMS

#: The files of weights, and their index.
WEIGHTS = ("consolidated*.safetensors",)
#: The files of tokenizers in Mistral's format that a download takes; those of names without a version are ``*.model``.
TOKENIZERS = ("tekken*.json", "tokenizer.model.v*")
_TEKKEN = re.compile(r"tekken.*\.json")
_SENTENCEPIECE = re.compile(r"tokenizer\.model\.v(?P<version>[0-9]{1,3})(?:m[0-9]+)?")


def has_only_mistral(names: Collection[str]) -> bool:
    """Whether a model with files of these names is in Mistral's format, and not in Hugging Face's as well."""
    return PARAMS in names and "config.json" not in names


def is_mistral_folder(folder: Path) -> bool:
    """Whether the folder is in Mistral's format, and not in Hugging Face's as well."""
    return has_only_mistral([name for name in (PARAMS, "config.json") if (folder / name).exists()])


def tokenizer_file(folder: Path) -> Path | None:
    """Return the tokenizer in Mistral's format: tekken.json, else SentencePiece's with the highest version; or None."""
    names = sorted(path.name for path in folder.glob("te*.json")) + sorted(
        path.name for path in folder.glob("tokenizer.model*")
    )
    if tekken := [name for name in names if _TEKKEN.fullmatch(name)]:
        return folder / tekken[0]
    found = {int(match["version"]): name for name in names if (match := _SENTENCEPIECE.fullmatch(name))}
    if found:
        return folder / found[max(found)]
    return folder / "tokenizer.model" if "tokenizer.model" in names else None


def has_only_mistral_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer in Mistral's format, and none in Hugging Face's.

    A tokenizer.model without a version counts as the latter, except in a folder with Mistral's config.
    """
    others = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    if any((folder / name).exists() for name in others) or (file := tokenizer_file(folder)) is None:
        return False
    return file.name != "tokenizer.model" or source_of(folder, MISTRAL) is not None
