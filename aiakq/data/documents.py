"""Documents for calibration and evaluation, from a file, a saved data set or the Hugging Face Hub.

The columns are detected: ``messages`` (role, content), ``conversations`` (from, value), ``text``, or a question and its
answer under one of their usual names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.data.chat import Message
from aiakq.errors import AiakqError, error

HINT = (
    "Give a UTF-8 text file; .jsonl, .json, .csv or .parquet with text or messages; or a data set of the hub "
    "(org/name[:config][:split]) or saved in a folder."
)
#: Maximum bytes read: far more than any calibration uses.
_MAX_BYTES = 1 << 30
#: Rows of a Parquet file in memory at a time.
_BATCH_ROWS = 32
_TEXT_KEYS = ("text", "content", "sentence", "document")
#: Column names that data sets use for a question and its answer.
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
)
#: ShareGPT's names of roles, and the usual ones.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "function": "tool"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class Document:
    """A text, or a conversation to be rendered by a chat template. ``where`` is its location in the data."""

    where: str
    text: str | None = None
    messages: tuple[Message, ...] = ()

    @property
    def size(self) -> int:
        """Approximate number of characters."""
        return len(self.text) if self.text is not None else sum(len(str(m.get("content"))) for m in self.messages)


def bad(source: str, reason: str, hint: str = HINT) -> AiakqError:
    """Return the error for unusable calibration data."""
    return error("calibration", source=source, reason=reason, hint=hint)


def sources(given: str | Path | None) -> list[str | None]:
    """The sources that ``--calibration`` names, several divided by commas; None is the bundled text."""
    if given is None or Path(given).exists():
        return [None if given is None else str(given)]
    return [name.strip() for name in str(given).split(",") if name.strip()]


def read_file(path: Path) -> Iterator[Document]:
    """Read the documents of a file, by its suffix; other files are one text. Raises ``calibration``, naming the line or
    row.
    """
    name = path.name
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            for number, line in enumerate(read_text(path, HINT).split("\n"), 1):
                if line.strip():
                    yield _document(_json(line, name, f"line {number}"), name, f"line {number}")
        case ".json":
            value = _json(read_text(path, HINT), name, "it")
            if not isinstance(value, list):
                raise bad(name, "it is no JSON list of texts or conversations")
            for number, item in enumerate(value, 1):
                yield _document(item, name, f"item {number}")
        case ".csv" | ".tsv" | ".parquet":
            _check_size(path)
            for number, row in enumerate(_rows(path), 1):
                yield _document(row, name, f"row {number}")
        case _:
            yield Document("it", read_text(path, HINT))


def read_dataset(name: str, characters: int, seed: int) -> Iterator[Document]:
    """Read documents of a data set until they have about ``characters`` characters.

    ``name`` is ``org/name[:config][:split]`` on the hub, read from the start; or a folder saved by ``datasets``
    (``folder[:split]``), whose rows are taken in an order that depends on the seed.
    """
    import datasets

    folder, _, part = name.rpartition(":") if not Path(name).is_dir() else (name, "", "")
    try:
        rows: Iterable[Mapping[str, Any]]
        if Path(folder).is_dir():
            saved = datasets.load_from_disk(folder)
            if isinstance(saved, datasets.DatasetDict):
                split = part or ("train" if "train" in saved else next(iter(saved)))
                if split not in saved:
                    raise bad(name, f"it has no split {split!r}, only {', '.join(saved)}")
                saved = saved[split]
            rows = saved.shuffle(seed=seed, keep_in_memory=True)
        else:
            if not _HUB_NAME.fullmatch(name):
                raise bad(name, "there is no such file")
            path, *rest = name.split(":")
            config = rest[0] if len(rest) == 2 else None
            rows = datasets.load_dataset(path, config, split=rest[-1] if rest else "train", streaming=True)
        for number, row in enumerate(rows, 1):
            document = _document(row, name, f"row {number}")
            yield document
            characters -= document.size
            if characters <= 0:
                break
    except AiakqError:
        raise
    except Exception as problem:
        # The datasets package raises HTTP, parsing and file errors of many kinds.
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise bad(name, f"it is no file, and datasets cannot read it ({reason[:200]})") from problem


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a table."""
    if path.suffix.lower() == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                # A few bytes can stand for gigabytes: values are repeated by reference.
                read = 0
                for batch in file.iter_batches(_BATCH_ROWS):
                    read += batch.nbytes
                    if read > _MAX_BYTES:
                        raise bad(path.name, "its rows hold more than 1 GiB", "A few megabytes are plenty.")
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as problem:
            first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            raise bad(path.name, f"it is no Parquet file ({first[:200].rstrip('.')})") from None
    else:
        import csv
        import io

        csv.field_size_limit(_MAX_BYTES)
        stream = io.StringIO(read_text(path, HINT), newline="")
        try:
            yield from csv.DictReader(stream, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        except csv.Error as problem:
            raise bad(path.name, f"it is no table ({problem})") from None


# --- one document -----------------------------------------------------------------------------------------------------


def _document(value: Any, source: str, where: str) -> Document:
    """Convert a line, item or row to a document. Raises ``calibration`` if its structure is unknown."""
    if isinstance(value, str):
        return Document(where, _sound(value, source, where))
    if isinstance(value, list):
        return Document(where, messages=_messages(value, source, where))
    if not isinstance(value, Mapping):
        raise bad(source, f"{where} is neither a text nor a JSON object")
    for key in ("messages", "conversations", "conversation"):
        talk = value.get(key)
        if isinstance(talk, Mapping) and talk and all(isinstance(column, list) for column in talk.values()):
            # Some data sets store a list of records as one list per field.
            talk = [dict(zip(talk, entries, strict=False)) for entries in zip(*talk.values(), strict=False)]
        if isinstance(talk, list):
            return Document(where, messages=_messages(talk, source, where))
    for key in _TEXT_KEYS:
        if isinstance(value.get(key), str):
            return Document(where, _sound(value[key], source, where))
    for ask, answer in _PAIRS:
        if value.get(ask) is not None and value.get(answer) is not None:
            return Document(where, messages=_pair(value, ask, answer, source, where))
    fields = ", ".join(sorted(map(str, value))[:6]) or "nothing"
    raise bad(source, f"{where} has no text, messages, or question with an answer (it has {fields})")


def _sound(text: str, source: str, where: str) -> str:
    """Return ``text`` if UTF-8 can encode it: JSON can contain lone surrogates, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad(source, f"{where} holds half a character") from None
    return text


def _pair(value: Mapping[str, Any], ask: str, answer: str, source: str, where: str) -> tuple[Message, ...]:
    """Convert a question and its answer, each a text or (as in TRL) a list of messages."""
    result: list[Message] = []
    if isinstance(value.get("system"), str) and value["system"]:
        result.append({"role": "system", "content": value["system"]})
    for key, role in ((ask, "user"), (answer, "assistant")):
        part = value[key]
        if isinstance(part, list):
            result += _messages(part, source, where)
            continue
        if not isinstance(part, str):
            raise bad(source, f"{where} has {key!r}, which is no text")
        more = value.get("input")
        if key == "instruction" and isinstance(more, str) and more:
            part = f"{part}\n\n{more}"
        result.append({"role": role, "content": _sound(part, source, where)})
    return tuple(result)


def _messages(value: list[Any], source: str, where: str) -> tuple[Message, ...]:
    """Convert a list of messages to the names that chat templates expect; other fields are kept."""
    result: list[Message] = []
    for number, item in enumerate(value, 1):
        at = f"{where}, message {number}"
        if not isinstance(item, Mapping):
            raise bad(source, f"{at} is no JSON object")
        message = {str(key): entry for key, entry in item.items() if entry is not None}
        role = message.pop("from", None) if "role" not in message else message["role"]
        content = message.pop("value", None) if "content" not in message else message["content"]
        if not isinstance(role, str):
            raise bad(source, f"{at} has no role")
        if isinstance(content, list) and all(
            isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content
        ):
            content = "".join(part["text"] for part in content)
        if content is None and "tool_calls" in message:
            content = ""
        if not isinstance(content, str):
            raise bad(source, f"{at} has no text as its content")
        result.append({**message, "role": _ROLES.get(role, role), "content": _sound(content, source, at)})
    if not result:
        raise bad(source, f"{where} is a conversation without messages")
    return tuple(result)


# --- files ------------------------------------------------------------------------------------------------------------


def read_text(path: Path, hint: str) -> str:
    """Return the text of a UTF-8 file of limited size. Raises ``calibration``."""
    _check_size(path, hint)
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise bad(str(path), problem.strerror or str(problem), hint) from None
    except UnicodeDecodeError:
        raise bad(path.name, "it is not UTF-8 text", hint) from None


def _check_size(path: Path, hint: str = HINT) -> None:
    try:
        if not path.is_file():
            raise bad(str(path), "it is no regular file" if path.exists() else "there is no such file", hint)
        if path.stat().st_size > _MAX_BYTES:
            raise bad(path.name, "it is larger than 1 GiB", "A few megabytes are plenty.")
    except OSError as problem:
        raise bad(str(path), problem.strerror or str(problem), hint) from None


def _json(text: str, source: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise bad(source, f"{where} is no JSON") from None
