"""Documents for calibration and evaluation, from a file, a saved data set or the Hugging Face Hub.

The columns are detected (see rows.py); ``RowOptions.column`` names another one. Rows without text are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from aiakq.data.files import HINT, TABLES, bad, file_kind, read_text
from aiakq.data.json_rows import json_values, looks_like_rows
from aiakq.data.rows import Document, RowOptions, document_of
from aiakq.data.tables import read_rows, row_without_nulls
from aiakq.errors import AiakqError, first_line
from aiakq.system.network import answers

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")
_JSON = (".jsonl", ".ndjson", ".json")


def sources(given: str | Path | None) -> list[str | None]:
    """The sources that ``--calibration`` names, several divided by commas; None is the bundled text."""
    if given is None or Path(given).exists():
        return [None if given is None else str(given)]
    return [name.strip() for name in str(given).split(",") if name.strip()]


def read_file(path: Path, rows: RowOptions | None = None) -> Iterator[Document]:
    """Read the documents of a file, by its suffix; another file is one text, unless it holds rows of JSON.

    Raises ``calibration``, naming the line or row.
    """
    name, rows, kind = path.name, rows or RowOptions(), file_kind(path)
    values: Iterator[tuple[object, str]]
    if kind in TABLES:
        values = ((row, f"row {number}") for number, row in enumerate(read_rows(path, HINT), 1))
    else:
        text = read_text(path, HINT)
        if kind not in _JSON and not looks_like_rows(text):
            yield Document("it", text)
            return
        values = json_values(text, name, lines=kind != ".json")
    for value, where in values:
        document = document_of(value, name, where, rows)
        if document is not None:
            yield document


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
        found: Iterable[Mapping[str, object]]
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
            document = document_of(row_without_nulls(row), name, f"row {number}", options)
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
        raise bad(name, f"it is no file, and datasets cannot read it ({first_line(problem)[:200]})") from problem
