"""Documents for calibration and evaluation, from a file, a saved data set or the Hugging Face Hub.

The columns are detected: ``messages`` (role, content), ``conversations`` (from, value), ``text``, or a question and its
answer under one of their usual names; ``RowOptions.column`` names another one. RowOptions without text are left out.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.data.chat import Message
from aiakq.errors import AiakqError, error
from aiakq.system.files import read_named
from aiakq.system.network import answers

HINT = (
    "Give a UTF-8 text file; .jsonl, .json, .csv or .parquet with text or messages; or a data set of the hub "
    "(org/name[:config][:split]) or saved in a folder."
)
#: Maximum bytes read: far more than any calibration uses.
_MAX_BYTES = 1 << 30
#: Rows of a Parquet file in memory at a time.
_BATCH_ROWS = 32
_TEXT_KEYS = ("text", "content", "sentence", "document", "article", "passage", "code", "body", "story", "markdown")
#: Columns with a conversation.
_TALKS = ("messages", "conversations", "conversation")
#: Column names that data sets use for a question and its answer.
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("question", "response"),
    ("inputs", "targets"),
    ("input", "output"),
    ("prompt", "chosen"),
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


#: Suffixes of files that are tables of rows.
TABLES = (".csv", ".tsv", ".parquet", ".arrow")


@dataclass
class RowOptions:
    """How rows become documents.

    column     the column to read; None detects it.
    num_empty  rows without text that were left out.
    """

    column: str | None = None
    num_empty: int = 0


def file_kind(path: Path) -> str:
    """Return the suffix that says what a file contains, without that of compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_file(path: Path, rows: RowOptions | None = None) -> Iterator[Document]:
    """Read the documents of a file, by its suffix; other files are one text. Raises ``calibration``, naming the line or
    row.
    """
    name, rows, kind = path.name, rows or RowOptions(), file_kind(path)
    if kind in (".jsonl", ".ndjson", ".json"):
        values = _json_values(read_text(path, HINT), name, lines=kind != ".json")
    elif kind in TABLES:
        values = ((row, f"row {number}") for number, row in enumerate(read_rows(path, HINT), 1))
    else:
        yield Document("it", read_text(path, HINT))
        return
    for value, where in values:
        document = _document(value, name, where, rows)
        if document is not None:
            yield document


def _json_values(text: str, name: str, lines: bool) -> Iterator[tuple[Any, str]]:
    """Yield the values of a JSON document or of JSON lines, and their places.

    ``lines`` is what the suffix says; a file of the other kind is recognized.
    """
    stripped = text.strip()
    starts_list = stripped.startswith("[")
    whole = decoded_json(stripped) if stripped and (not lines or starts_list or stripped.startswith("{")) else None
    if whole is None and not lines and "\n" not in stripped:
        raise bad(name, "it is no JSON")
    if whole is not None:
        yield from _json_items(whole, name)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            value = _json(line, name, f"line {number}")
            if isinstance(value, list) and not _is_conversation(value):
                yield from ((item, f"line {number}, item {at}") for at, item in enumerate(value, 1))
            else:
                yield value, f"line {number}"


def _json_items(whole: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Yield the items of a JSON document: a list, an object that wraps one, or an object of columns."""
    if isinstance(whole, Mapping):
        whole = _table(whole)
    if isinstance(whole, Mapping):
        yield whole, "line 1"
    elif isinstance(whole, list) and _is_conversation(whole):
        yield whole, "it"
    elif isinstance(whole, list):
        for number, item in enumerate(whole, 1):
            # The dataset viewer of the hub wraps each row.
            row = item.get("row") if isinstance(item, Mapping) else None
            yield row if isinstance(row, Mapping) else item, f"item {number}"
    else:
        raise bad(name, "it is no JSON list of texts or conversations")


def _is_conversation(value: list[Any]) -> bool:
    """Whether a list is one conversation rather than several documents."""
    return bool(value) and all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value)


def _table(value: Mapping[str, Any]) -> Any:
    """Return the rows of an object of columns or of one that wraps a list of rows; any other object as it is."""
    lists = {key: column for key, column in value.items() if isinstance(column, list)}
    if any(key in lists and not all(isinstance(talk, list) for talk in lists[key]) for key in _TALKS):
        return value
    rows = [column for column in lists.values() if not _is_conversation(column)]
    for column in rows:
        if len(rows) == 1 and column and all(isinstance(item, Mapping) for item in column):
            return column
    if lists and len(lists) == len(value) and len(rows) == len(lists):
        sizes = {len(column) for column in lists.values()}
        if len(sizes) == 1:
            return [dict(zip(lists, entries, strict=True)) for entries in zip(*lists.values(), strict=True)]
    return value


def read_dataset(name: str, characters: int, seed: int, rows: RowOptions | None = None) -> Iterator[Document]:
    """Read documents of a data set until they have about ``characters`` characters.

    ``name`` is ``org/name[:config][:split]`` on the hub, read from the start; or a folder saved by ``datasets``
    (``folder[:split]``), whose rows are taken in an order that depends on the seed.
    """
    import datasets
    from huggingface_hub import constants

    options = rows or RowOptions()
    folder, _, part = name.rpartition(":") if not Path(name).is_dir() else (name, "", "")
    try:
        found: Iterable[Mapping[str, Any]]
        if Path(folder).is_dir():
            saved = datasets.load_from_disk(folder)
            if isinstance(saved, datasets.DatasetDict):
                split = part or ("train" if "train" in saved else next(iter(saved)))
                if split not in saved:
                    raise bad(name, f"it has no split {split!r}, only {', '.join(saved)}")
                saved = saved[split]
            found = saved.shuffle(seed=seed, keep_in_memory=True)
        else:
            if not _HUB_NAME.fullmatch(name):
                raise bad(name, "there is no such file")
            if not constants.HF_HUB_OFFLINE and not answers(constants.ENDPOINT):
                raise bad(name, "it is no file or folder here, and the hub does not answer")
            path, *rest = name.split(":")
            config = rest[0] if len(rest) == 2 else None
            found = datasets.load_dataset(path, config, split=rest[-1] if rest else "train", streaming=True)
        for number, row in enumerate(found, 1):
            document = _document(row, name, f"row {number}", options)
            if document is None:
                continue
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


def read_rows(path: Path, hint: str) -> Iterator[dict[str, Any]]:
    """Return the rows of a table. Raises ``calibration``."""
    kind = file_kind(path)
    if kind in (".parquet", ".arrow"):
        import pyarrow

        content = pyarrow.BufferReader(read_bytes(path, hint))
        try:
            read = 0
            for batch in _batches(content, kind):
                # A few bytes can stand for gigabytes: values are repeated by reference.
                read += batch.nbytes
                if read > _MAX_BYTES:
                    raise bad(path.name, "its rows hold more than 1 GiB", "A few megabytes are plenty.")
                for first_row in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from batch.slice(first_row, _BATCH_ROWS).to_pylist()
        except (pyarrow.ArrowException, OSError) as problem:
            first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            title = "Parquet" if kind == ".parquet" else "Arrow"
            raise bad(path.name, f"it is no {title} file ({first[:200].rstrip('.')})", hint) from None
    else:
        import csv

        csv.field_size_limit(_MAX_BYTES)
        stream = io.StringIO(read_text(path, hint), newline="")
        try:
            yield from csv.DictReader(stream, delimiter="\t" if kind == ".tsv" else ",")
        except csv.Error as problem:
            raise bad(path.name, f"it is no table ({problem})", hint) from None


def _batches(content: Any, kind: str) -> Iterator[Any]:
    """Yield the record batches of a Parquet file or of an Arrow file or stream, as ``datasets`` writes them."""
    import pyarrow
    import pyarrow.parquet

    if kind == ".parquet":
        yield from pyarrow.parquet.ParquetFile(content).iter_batches(_BATCH_ROWS)
        return
    try:
        reader = pyarrow.ipc.open_stream(content)
    except pyarrow.ArrowInvalid:
        content.seek(0)
        file = pyarrow.ipc.open_file(content)
        yield from (file.get_batch(number) for number in range(file.num_record_batches))
        return
    yield from reader


# --- one document -----------------------------------------------------------------------------------------------------


def _document(value: Any, source: str, where: str, rows: RowOptions) -> Document | None:
    """Convert a line, item or row to a document; None for one without text, which is counted.

    Raises ``calibration`` if its structure is unknown.
    """
    if isinstance(value, Mapping):
        value = _cell(value, source, where, rows.column)
    if value is None or (isinstance(value, (str, list)) and not value) or (isinstance(value, str) and value.isspace()):
        rows.num_empty += 1
        return None
    if isinstance(value, str):
        return Document(where, _sound(value, source, where))
    if isinstance(value, tuple):
        return Document(where, messages=value)
    if isinstance(value, list):
        return Document(where, messages=_messages(value, source, where))
    raise bad(source, f"{where} is neither a text nor a JSON object")


def _cell(value: Mapping[str, Any], source: str, where: str, column: str | None) -> Any:
    """Return what a row contains: a text, a list or tuple of messages, or None if it is empty.

    Raises ``calibration`` for a row without a known column.
    """
    if column is not None:
        if column not in value:
            has = ", ".join(sorted(map(str, value))[:6]) or "nothing"
            raise bad(source, f"{where} has no column {column!r} (it has {has})", "Give one of them.")
        return _talk(value[column])
    for key in _TALKS:
        talk = _talk(value.get(key))
        if isinstance(talk, list):
            return talk
    for key in _TEXT_KEYS:
        if isinstance(value.get(key), str):
            return value[key]
    for ask, answer in _PAIRS:
        if value.get(ask) is not None and value.get(answer) is not None:
            return _pair(value, ask, answer, source, where)
    if isinstance(value.get("chosen"), (list, str)):
        return value["chosen"]
    known = {*_TEXT_KEYS, *(name for pair in _PAIRS for name in pair), *_TALKS}
    if any(name in value for name in known) and not any(value.get(name) for name in known):
        return None
    texts = [each for each in value.values() if isinstance(each, str) and len(each.split()) > 1]
    if len(texts) == 1:
        return texts[0]
    fields = ", ".join(sorted(map(str, value))[:6]) or "nothing"
    reason = f"{where} has no text, messages, or question with an answer (it has {fields})"
    raise bad(source, reason, "Name the column with --calibration-column.")


def _talk(value: Any) -> Any:
    """Return a conversation that is stored as one list per field as a list of messages; anything else as it is."""
    if isinstance(value, Mapping) and value and all(isinstance(column, list) for column in value.values()):
        return [dict(zip(value, entries, strict=False)) for entries in zip(*value.values(), strict=False)]
    return value


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
    """Return the text of a file in UTF-8 or, with a byte order mark, UTF-16. Raises ``calibration``."""
    content = read_bytes(path, hint)
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise bad(path.name, f"it is not UTF-8 text (line {line})", hint) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_bytes(path: Path, hint: str) -> bytes:
    """Return the content of a file of limited size, decompressed if its suffix is .gz. Raises ``calibration``."""
    if not path.exists():
        raise bad(str(path), "there is no such file", hint)

    def unreadable(reason: str) -> AiakqError:
        return bad(path.name, reason, "A few megabytes are plenty." if "larger" in reason else hint)

    content = read_named(path, _MAX_BYTES, unreadable)
    if path.suffix.lower() != ".gz":
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            content = stream.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error):
        raise bad(path.name, "it is no gzip file", hint) from None
    if len(content) > _MAX_BYTES:
        raise unreadable("it is larger than 1 GiB")
    return content


def _json(text: str, source: str, where: str) -> Any:
    value = decoded_json(text)
    if value is None and text.strip() != "null":
        raise bad(source, f"{where} is no JSON")
    return value


def decoded_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
