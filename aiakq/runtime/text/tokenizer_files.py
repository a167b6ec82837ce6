"""What is wrong with the files of a tokenizer, in words: transformers names neither the file nor a remedy."""

from __future__ import annotations

from pathlib import Path

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import read_json, vocabulary_files

#: Any of these may be all that a tokenizer has.
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder has files of a tokenizer."""
    if any((folder / name).is_file() for name in (*_VOCABULARIES, "tokenizer_config.json")):
        return True
    return bool(vocabulary_files(folder))


def _is_code(folder: Path) -> bool:
    """Whether tokenizer_config.json names Python code of the model folder."""
    try:
        return bool(read_json(folder / "tokenizer_config.json", "tokenizer_config.json").get("auto_map"))
    except AiakqError:
        return False


def why_unreadable(folder: Path, failure: BaseException) -> AiakqError:
    """The error for a tokenizer that transformers failed to read.

    It is ``tokenizer_missing``, ``remote_code`` or ``model_malformed``.
    """
    if not has_tokenizer(folder):
        return error("tokenizer_missing", path=str(folder))
    if _is_code(folder) and "trust_remote_code" in str(failure):
        return error("remote_code", path=str(folder))
    for name in _JSON:
        if (folder / name).is_file():
            try:
                read_json(folder / name, str(folder / name))
            except AiakqError as problem:
                return problem
    reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
    return error("model_malformed", file=f"the tokenizer in '{folder}'", reason=reason.rstrip("."))
