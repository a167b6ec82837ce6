"""Calibration samples: token ids from a file of ids, a text file, a data set on the hub, or the bundled text.

Nothing is padded and nothing is dropped: long texts and long samples are cut into pieces of ``seqlen``. The choice of
pieces depends on the seed alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.quantizers.options import QuantizeOptions

_HINT_IDS = "One sample per line: token ids separated by commas or spaces; or a JSON list of lists of ids."
_HINT_TEXT = "Give a UTF-8 text file, a .jsonl with 'text' fields, or the name of a data set on the hub (org/name)."
_SPLIT = re.compile(r"[,\s]+")
#: Text is tokenized in pieces of about this many characters, so that one huge line cannot stall the tokenizer.
_PIECE = 8192
#: Characters read at most: far more than any calibration uses.
_MAX_BYTES = 1 << 30


@dataclass
class Samples:
    """What the model is calibrated on.

    samples  token ids, each [T] int64 with T at most seqlen.
    source   what to call it in a report.
    """

    samples: list[Tensor]
    source: str
    warnings: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(sample) for sample in self.samples)

    @property
    def digest(self) -> str:
        """sha256 over all samples, which identifies them in the output's notes."""
        state = hashlib.sha256()
        for sample in self.samples:
            state.update(len(sample).to_bytes(8, "little"))
            state.update(sample.numpy().tobytes())
        return state.hexdigest()


def load_samples(options: QuantizeOptions, tokenizer: Any, vocab_size: int) -> Samples:
    """The calibration samples these options mean.

    ``tokenizer`` is a transformers tokenizer, or None if the model folder has none (then only ids work). Raises
    ``calibration`` for anything unusable in the data, with the line.
    """
    if options.token_ids is not None:
        path = Path(options.token_ids)
        source = f"token ids of {path.name}"
        pieces = [piece for sample in read_token_ids(path, vocab_size) for piece in _cut(sample, options.seqlen)]
        chosen = pick(pieces, options.samples, options.seed)
    else:
        if tokenizer is None:
            raise _bad("text", "the model folder has no tokenizer", "Give token ids with -token FILE.")
        texts, source = _texts(options)
        ids = tokenize(texts, tokenizer)
        _check_ids(ids, vocab_size)
        chosen = _windows(ids, options, _bos(tokenizer))
    if not chosen:
        raise _bad(source, "it holds no token", _HINT_IDS if options.token_ids is not None else _HINT_TEXT)
    samples = Samples([torch.tensor(sample, dtype=torch.int64) for sample in chosen], source)
    wanted = options.samples * options.seqlen
    if samples.tokens < wanted // 4:
        samples.warnings.append(
            f"Calibration used {samples.tokens} tokens of {source}; {wanted} were asked for. "
            "Few tokens make poor statistics."
        )
    return samples


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The folder's tokenizer as transformers loads it, or None if it has none that works."""
    import transformers

    if not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    ):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as problem:
        # Tokenizer code raises whatever its file provokes; the model itself may still be fine with token ids.
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise error("model_malformed", file="the tokenizer", reason=reason) from problem


def _bad(source: str, reason: str, hint: str) -> AiakqError:
    return error("calibration", source=source, reason=reason, hint=hint)


# --- token ids --------------------------------------------------------------------------------------------------------


def read_token_ids(path: Path, vocab_size: int) -> list[list[int]]:
    """The samples of a file of token ids, whose form is found out.

    Lines of integers separated by commas or white space, each optionally in brackets, ``#`` starting a comment; or a
    JSON list of lists; or JSON lines, each a list or an object with ``input_ids``. Raises ``calibration``.
    """
    text = _read_text(path, _HINT_IDS)
    whole = _as_json(text) if text.lstrip().startswith("[") else None
    samples: list[list[int]] = []
    if whole is not None and isinstance(whole, list) and any(isinstance(item, list) for item in whole):
        for number, item in enumerate(whole, 1):
            samples.append(_ids(item, f"sample {number}", path, vocab_size))
    else:
        for number, line in enumerate(text.splitlines(), 1):
            content = line.strip()
            if not content.startswith("{"):
                content = content.partition("#")[0].strip()
            if content:
                samples.append(_ids(_line(content, number, path), f"line {number}", path, vocab_size))
    samples = [sample for sample in samples if sample]
    if not samples:
        raise _bad(path.name, "it holds no sample", _HINT_IDS)
    return samples


def _line(content: str, number: int, path: Path) -> Any:
    if content.startswith("{"):
        value = _as_json(content)
        if not isinstance(value, dict) or not isinstance(value.get("input_ids"), list):
            raise _bad(path.name, f"line {number} is no JSON object with a list 'input_ids'", _HINT_IDS)
        return value["input_ids"]
    if content.startswith("["):
        content = content[1:].rstrip(", ").removesuffix("]")
    words = [word for word in _SPLIT.split(content) if word]
    for word in words:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", word):
            raise _bad(path.name, f"line {number} holds {word[:40]!r}, which is no integer", _HINT_IDS)
    return [int(word) for word in words]


def _ids(value: Any, where: str, path: Path, vocab_size: int) -> list[int]:
    if not isinstance(value, list):
        raise _bad(path.name, f"{where} is no list of ids", _HINT_IDS)
    for item in value:
        if type(item) is not int:
            raise _bad(path.name, f"{where} holds {str(item)[:40]!r}, which is no integer", _HINT_IDS)
        if not 0 <= item < vocab_size:
            raise _bad(
                path.name,
                f"{where} holds the id {item}, outside 0..{vocab_size - 1}",
                "Make the ids with this model's own tokenizer.",
            )
    return value


def _as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- text -------------------------------------------------------------------------------------------------------------


def _texts(options: QuantizeOptions) -> tuple[list[str], str]:
    """Documents and what to call them."""
    if options.calibration is None:
        import aiakq.data

        return [aiakq.data.text("calibration")], "the bundled text"
    path = Path(options.calibration)
    if path.is_file():
        return read_documents(path), path.name
    name = str(options.calibration)
    if path.suffix in (".txt", ".json", ".jsonl") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}", name):
        raise _bad(name, "there is no such file", _HINT_TEXT)
    return _dataset(name, options), name


def read_documents(path: Path) -> list[str]:
    """The documents of a text file (one), a .jsonl (its ``text`` fields) or a .json list of strings."""
    text = _read_text(path, _HINT_TEXT)
    if path.suffix == ".jsonl":
        documents = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            value = _as_json(line)
            if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                raise _bad(path.name, f"line {number} is no JSON object with a string 'text'", _HINT_TEXT)
            documents.append(value["text"])
        return documents
    if path.suffix == ".json":
        value = _as_json(text)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _bad(path.name, "it is no JSON list of strings", _HINT_TEXT)
        return value
    return [text]


def _dataset(name: str, options: QuantizeOptions) -> list[str]:
    """Documents of a hub data set, ``org/name[:config][:split]``; as many as surely hold enough tokens."""
    import datasets

    path, *rest = name.split(":")
    config = rest[0] if len(rest) == 2 else None
    split = rest[-1] if rest else "train"
    documents: list[str] = []
    wanted = options.samples * options.seqlen * 8  # characters; a token is about four
    try:
        rows = datasets.load_dataset(path, config, split=split, streaming=True)
        field_name: str | None = None
        for row in rows:
            if field_name is None:
                field_name = next(
                    (key for key in ("text", "content", "sentence") if isinstance(row.get(key), str)), None
                )
                if field_name is None:
                    raise _bad(name, f"its rows have no text among {sorted(row)[:6]}", _HINT_TEXT)
            documents.append(row[field_name])
            wanted -= len(row[field_name])
            if wanted <= 0:
                break
    except AiakqError:
        raise
    except Exception as problem:
        # The datasets package raises HTTP, parsing and file errors of many kinds.
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise _bad(name, f"it is no file, and the hub did not deliver it ({reason[:200]})", _HINT_TEXT) from problem
    return documents


def _read_text(path: Path, hint: str) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _bad(path.name, "it is larger than 1 GiB", "A few megabytes are plenty.")
        return path.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise _bad(str(path), problem.strerror or str(problem), hint) from None
    except UnicodeDecodeError:
        raise _bad(path.name, "it is not UTF-8 text", hint) from None


def tokenize(documents: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each document, without special tokens. Long documents are tokenized in pieces at line ends."""
    result = []
    for document in documents:
        ids: list[int] = []
        pieces = list(_pieces(document))
        for start in range(0, len(pieces), 64):
            encoded = tokenizer(pieces[start : start + 64], add_special_tokens=False, verbose=False)
            for part in encoded["input_ids"]:
                ids.extend(part)
        result.append(ids)
    return result


def _pieces(document: str) -> Iterator[str]:
    """The document in pieces of at least _PIECE characters where it has line ends, and at most four times that."""
    piece = ""
    for line in document.splitlines(keepends=True):
        for start in range(0, len(line), 4 * _PIECE):
            piece += line[start : start + 4 * _PIECE]
            if len(piece) >= _PIECE:
                yield piece
                piece = ""
    if piece:
        yield piece


def _bos(tokenizer: Any) -> list[int]:
    """What this tokenizer puts before a text, which models expect at the beginning of a window."""
    ids = tokenizer("", verbose=False)["input_ids"]
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _check_ids(documents: list[list[int]], vocab_size: int) -> None:
    highest = max((max(ids) for ids in documents if ids), default=0)
    if highest >= vocab_size:
        reason = f"the tokenizer made the id {highest}, outside 0..{vocab_size - 1}"
        raise _bad("text", reason, "The tokenizer does not belong to this model.")


# --- choosing ---------------------------------------------------------------------------------------------------------


def _windows(documents: list[list[int]], options: QuantizeOptions, bos: list[int]) -> list[list[int]]:
    """Chosen windows of at most seqlen tokens, each with what the tokenizer puts before a text."""
    body = options.seqlen - len(bos)
    joined: list[int] = []
    for ids in documents:
        joined.extend(ids)
    pieces = _cut(joined, body)
    # The last, shorter piece only counts when there is nothing else.
    whole = [piece for piece in pieces if len(piece) == body] or pieces
    return [bos + piece for piece in pick(whole, options.samples, options.seed)]


def _cut(ids: list[int], length: int) -> list[list[int]]:
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def pick(pieces: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """``count`` pieces chosen by ``seed``, in their original order; all of them if there are fewer."""
    if len(pieces) <= count:
        return pieces
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(pieces), generator=generator)[:count]
    return [pieces[index] for index in sorted(chosen.tolist())]
