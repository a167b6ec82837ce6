"""Which file of a tokenizer transformers could not read, and why: its own messages rarely name it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from aiakq.errors import AiakqError, error, first_line
from aiakq.formats.model_folder import read_file, read_json
from aiakq.runtime.text.tokenizer_files import has_tokenizer, wrong_encodings
from aiakq.system.files import IS_LFS_POINTER, LFS_POINTER

_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
#: A line of a tiktoken vocabulary: a token in base64 and its rank.
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/=]+ [0-9]+\r?\n")
#: What the package tokenizers says of a part that it does not know.
_UNKNOWN_PART = re.compile(r"untagged enum (\w+?)(Untagged|Wrapper)?\b")


def why_unreadable(folder: Path, failure: BaseException) -> AiakqError:
    """Return the error for a tokenizer that transformers failed to read.

    It is ``tokenizer_missing``, ``remote_code``, ``model_incomplete`` or ``model_malformed``.
    """
    if not has_tokenizer(folder):
        return missing(folder)
    if _is_code(folder) and "trust_remote_code" in str(failure):
        return error("remote_code", path=str(folder))
    for name, reason in wrong_encodings(folder):
        return error("model_malformed", file=str(folder / name), reason=reason)
    for name in _JSON:
        if (folder / name).is_file():
            try:
                _check_json(folder, name)
            except AiakqError as problem:
                return problem
    if vocabulary := _of_vocabulary(folder):
        return vocabulary
    reason = first_line(failure)
    if isinstance(failure, KeyError):
        reason = f"it has no {reason}"
    if unknown := _UNKNOWN_PART.search(reason):
        from importlib.metadata import version  # slower to import than this module

        reason = f"its {unknown[1]} is damaged, or of a kind that tokenizers {version('tokenizers')} does not know"
    name = "tokenizer.json" if (folder / "tokenizer.json").is_file() else f"the tokenizer in '{folder}'"
    return error("model_malformed", file=name, reason=reason)


def missing(folder: Path) -> AiakqError:
    """Return the error for a model folder without a tokenizer, naming a folder inside it that has one."""
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir() and has_tokenizer(path))
    elsewhere = f", but its folder '{inside[0]:.100}' has one" if inside else ""
    return error("tokenizer_missing", path=str(folder), elsewhere=elsewhere)


def _is_code(folder: Path) -> bool:
    """Whether tokenizer_config.json names Python code of the model folder."""
    try:
        return bool(read_json(folder / "tokenizer_config.json", "tokenizer_config.json").get("auto_map"))
    except AiakqError:
        return False


def _check_json(folder: Path, name: str) -> None:
    """Raise ``model_malformed`` for a file that is not a JSON object."""
    read_json(folder / name, str(folder / name))


def _of_vocabulary(folder: Path) -> AiakqError | None:
    """Return what is wrong with the vocabulary of a folder without tokenizer.json, if that is seen."""
    if (folder / "tokenizer.json").is_file():
        return None
    for name in _SENTENCEPIECE:
        if (folder / name).is_file() and (reason := _not_sentencepiece(read_file(folder, name))):
            return error("model_malformed", file=str(folder / name), reason=reason)
    is_there = {name: (folder / name).is_file() for name in ("vocab.json", "merges.txt")}
    absent = [name for name, there in is_there.items() if not there]
    if len(absent) == 1:
        there = next(name for name in is_there if name not in absent)
        return error("model_incomplete", path=str(folder), missing=f"{there} is there, but {absent[0]} is missing")
    if not absent:
        return next(_of_pairs(folder), None)
    return None if any((folder / name).is_file() for name in (*_SENTENCEPIECE, "vocab.txt")) else _no_vocabulary(folder)


def _no_vocabulary(folder: Path) -> AiakqError | None:
    """Return ``tokenizer_missing`` if there is nothing but settings; None if code may read another file."""
    if _is_code(folder) or any(folder.glob("*.tiktoken")) or any(folder.glob("*.model")):
        return None
    return missing(folder)


def _not_sentencepiece(content: bytes) -> str | None:
    """Return why a file is no SentencePiece model, which begins with the field of its first token."""
    if not content:
        return "it is empty"
    if content.startswith(LFS_POINTER):
        return IS_LFS_POINTER
    if _TIKTOKEN.match(content):
        return "it is a vocabulary of tiktoken, which only the model's own code or a tokenizer.json can say how to use"
    return None if content.startswith(b"\n") else "it is not a SentencePiece model"


def _of_pairs(folder: Path) -> Iterator[AiakqError]:
    """Yield what is wrong with vocab.json and merges.txt together."""
    vocab = read_json(folder / "vocab.json", "vocab.json")
    wrong = next((f"{token!r:.60} is {id!r:.60}" for token, id in vocab.items() if type(id) is not int or id < 0), None)
    if wrong:
        yield error("model_malformed", file=str(folder / "vocab.json"), reason=f"{wrong}, not a token id")
    lines = read_file(folder, "merges.txt").decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        pair = line.split(" ")
        if line.startswith("#version") or not line.strip():
            continue
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            known = "is not two tokens of vocab.json that make a third"
            reason = f"line {number} ({json.dumps(line)[:60]}) {known}"
            yield error("model_malformed", file=str(folder / "merges.txt"), reason=reason)
            return
    settings = folder / "tokenizer_config.json"
    if not (settings.is_file() and read_json(settings, settings.name).get("tokenizer_class")):
        reason = "it names no tokenizer_class, and vocab.json and merges.txt do not say which tokenizer they belong to"
        yield error("model_malformed", file=str(settings), reason=reason)
