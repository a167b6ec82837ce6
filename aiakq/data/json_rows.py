"""Rows in JSON files: lists, JSON lines, objects of columns, and objects that wrap them.

Wrappers are those of data sets (``data``, ``train``, ``rows``), of the hub's viewer, and of pandas' ``to_json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aiakq.data.files import bad, decoded_json
from aiakq.data.messages import TALKS, is_conversation
from aiakq.data.rows import KNOWN, has_known_columns, plain_name

#: Names of lists of rows in an object, in order of preference.
_WRAPPERS = ("train", "training", "rows", "data", "dataset", "examples", "samples", "items", "records", "instances")
#: Splits; without ``train``, one of several has to be chosen.
_SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev", "eval")


def json_values(text: str, name: str, lines: bool) -> Iterator[tuple[object, str]]:
    """Yield the values of a JSON document or of JSON lines, and their places.

    ``lines`` is what the suffix says; a file of the other kind is recognized. Raises ``calibration``.
    """
    stripped = text.strip()
    whole = decoded_json(stripped) if stripped and (not lines or stripped.startswith(("[", "{"))) else None
    if whole is None and not lines and "\n" not in stripped:
        raise bad(name, "it is no JSON")
    if whole is not None:
        yield from _items(whole, name)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            value = decoded_json(line)
            if value is None and line.strip() != "null":
                raise bad(name, f"line {number} is no JSON")
            if isinstance(value, list) and not is_conversation(value):
                yield from ((item, f"line {number}, item {at}") for at, item in enumerate(value, 1))
            else:
                yield value, f"line {number}"


def _items(whole: object, name: str) -> Iterator[tuple[object, str]]:
    """Yield the items of a JSON document: a list, an object that wraps one, or an object of columns."""
    if isinstance(whole, Mapping):
        whole = rows_of(whole, name)
    if isinstance(whole, Mapping):
        yield whole, "line 1"
    elif isinstance(whole, list) and is_conversation(whole):
        yield whole, "it"
    elif isinstance(whole, list):
        for number, item in enumerate(whole, 1):
            # The dataset viewer of the hub wraps each row.
            row = item.get("row") if isinstance(item, Mapping) else None
            yield row if isinstance(row, Mapping) else item, f"item {number}"
    else:
        raise bad(name, "it is no JSON list of texts or conversations")


def rows_of(value: Mapping[str, object], name: str, columns: frozenset[str] = KNOWN) -> object:
    """Return the rows of an object of columns or of one that wraps a list of rows; any other object as it is.

    columns  names of columns that rows can have, in plain spelling.
    Raises ``calibration`` for several lists of rows none of which is the one to train on.
    """
    if _is_table(value, columns):
        return _zipped(value)
    named = {plain_name(key): inner for key, inner in value.items()}
    known = columns & named.keys()
    if known - {"data"} and not all(isinstance(named[key], Mapping) for key in known):
        return value
    splits = [key for key in _SPLITS if _is_rows(named.get(key), name, columns)]
    if len(splits) > 1 and "train" not in splits and "training" not in splits:
        raise bad(name, f"it holds the splits {', '.join(splits)}", "Write the one to read into a file of its own.")
    pandas = _split_orient(named)
    if pandas is not None:
        return pandas
    for key in (*_WRAPPERS, *splits):
        if _is_rows(named.get(key), name, columns):
            inner = named[key]
            return rows_of(inner, name, columns) if isinstance(inner, Mapping) else inner
    if value and all(isinstance(column, Mapping) for column in value.values()):
        return _by_index(value, columns)
    lists = [column for column in value.values() if _is_list_of_rows(column)]
    return lists[0] if len(lists) == 1 else value


def _is_rows(value: object, name: str, columns: frozenset[str]) -> bool:
    """Whether a value is a list of rows or of texts, or an object that wraps one."""
    if isinstance(value, list):
        return bool(value) and not is_conversation(value) and isinstance(value[0], Mapping | str | list)
    return isinstance(value, Mapping) and rows_of(value, name, columns) is not value


def _is_list_of_rows(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and not is_conversation(value)
        and all(isinstance(item, Mapping) for item in value)
    )


def _is_table(value: Mapping[str, Any], columns: frozenset[str]) -> bool:
    """Whether an object has a list for each column, all of one length, and at least one of a known name."""
    lists = [column for column in value.values() if isinstance(column, list)]
    if not lists or len(lists) < len(value) or any(is_conversation(column) for column in lists):
        return False
    if len({len(column) for column in lists}) > 1:
        return False
    names = {plain_name(key): column for key, column in value.items()}
    if any(key in names and not all(isinstance(talk, list) for talk in names[key]) for key in TALKS if key in columns):
        return False
    if len(value) == 1 and all(isinstance(item, Mapping) for item in lists[0]):
        return False
    return bool(columns & names.keys()) or not any(key in _WRAPPERS or key in _SPLITS for key in names)


def _zipped(value: Mapping[str, object]) -> list[dict[str, object]]:
    return [dict(zip(value, entries, strict=True)) for entries in zip(*value.values(), strict=True)]


def _split_orient(named: Mapping[str, object]) -> list[dict[str, object]] | None:
    """Return the rows of pandas' ``to_json(orient="split")``; None for another object."""
    names, data = named.get("columns"), named.get("data")
    if not isinstance(names, list) or not isinstance(data, list):
        return None
    if not all(isinstance(row, list) and len(row) == len(names) for row in data):
        return None
    return [dict(zip(map(str, names), row, strict=True)) for row in data]


def _by_index(value: Mapping[str, Any], columns: frozenset[str]) -> object:
    """Return the rows of an object of objects: columns by index, as pandas writes them, or rows by index."""
    inner = list(value.values())
    if columns & set(map(plain_name, value)) and all(each.keys() == inner[0].keys() for each in inner):
        if all(str(key).isdigit() for key in inner[0]):
            return [{name: column[key] for name, column in value.items()} for key in inner[0]]
        return value
    if len(inner) > 1 and all(any(plain_name(key) in columns for key in each) for each in inner):
        return inner
    return value


def looks_like_rows(text: str) -> bool:
    """Whether a text of another suffix is JSON or JSON lines with columns that are detected."""
    start = text.lstrip()[:1]
    if start not in ("[", "{"):
        return False
    first = decoded_json(text.lstrip().split("\n", 1)[0])
    value = first if first is not None else decoded_json(text)
    if isinstance(value, list):
        return is_conversation(value) or (bool(value) and has_known_columns(value[0]))
    return has_known_columns(value)
