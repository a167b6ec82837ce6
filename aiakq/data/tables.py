"""Rows of tables: CSV and TSV as spreadsheets and pandas write them, Parquet and Arrow."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from aiakq.data.files import MAX_BYTES, bad, file_kind, read_bytes, read_text
from aiakq.data.rows import KNOWN, plain_name
from aiakq.errors import first_line

#: Rows of a Parquet file in memory at a time.
_BATCH_ROWS = 32
_DELIMITERS = (",", ";", "\t", "|")
#: Rows from which the delimiter is determined.
_TRIED = 20
_QUOTES = 'Put texts that contain the separator or line ends in quotes ("), or write JSON lines or Parquet.'


def read_rows(path: Path, hint: str, known: frozenset[str] = KNOWN) -> Iterator[dict[str, object]]:
    """Return the rows of a table; ``known`` are names of columns by which a header is recognized.

    Columns of a CSV file without a header are named ``column 1``, ``column 2`` and so on. Raises ``calibration``.
    """
    kind = file_kind(path)
    if kind in (".csv", ".tsv"):
        yield from _delimited(read_text(path, hint), path.name, "\t" if kind == ".tsv" else ",", known)
        return
    import pyarrow

    content = pyarrow.BufferReader(read_bytes(path, hint))
    try:
        read = 0
        for batch in _batches(content, kind):
            # A few bytes can stand for gigabytes: values are repeated by reference.
            read += batch.nbytes
            if read > MAX_BYTES:
                raise bad(path.name, "its rows hold more than 1 GiB", "A few megabytes are plenty.")
            for first_row in range(0, batch.num_rows, _BATCH_ROWS):
                yield from map(row_without_nulls, batch.slice(first_row, _BATCH_ROWS).to_pylist())
    except (pyarrow.ArrowException, OSError) as problem:
        title = "Parquet" if kind in (".parquet", ".pq") else "Arrow"
        raise bad(path.name, f"it is no {title} file ({first_line(problem)[:200]})", hint) from None


def row_without_nulls(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row without null fields inside its columns: a column has one type, with the fields of all its values."""
    return {name: _without_nulls(cell) for name, cell in row.items()}


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(item) for item in value]
    return value


def _batches(content: Any, kind: str) -> Iterator[Any]:
    """Yield the record batches of a Parquet file or of an Arrow file or stream, as ``datasets`` writes them."""
    import pyarrow
    import pyarrow.parquet

    if kind in (".parquet", ".pq"):
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


# --- CSV --------------------------------------------------------------------------------------------------------------


def _delimited(text: str, name: str, usual: str, known: frozenset[str]) -> Iterator[dict[str, object]]:
    """Yield the rows of a text with separated values; ``usual`` is the delimiter that the suffix stands for."""
    csv.field_size_limit(MAX_BYTES)
    first, _, rest = text.partition("\n")
    if first.startswith("sep=") and len(first) == 5:  # a line of Excel
        delimiter, text = first[-1], rest
    else:
        delimiter = _delimiter(text, usual, known)
    lines = [cells for cells in _parsed(text, name, delimiter) if cells]
    if not lines:
        return
    header = [cell.strip().strip("\ufeff") for cell in lines[0]]
    if _is_header(header, known):
        del lines[0]
        repeated = next((each for at, each in enumerate(header) if each and each in header[:at]), None)
        if repeated is not None:
            raise bad(name, f"it has two columns named {repeated[:40]!r}", "Give each column a name of its own.")
    else:
        header = [f"column {number}" for number in range(1, len(header) + 1)]
    for number, cells in enumerate(lines, 1):
        while len(cells) > len(header) and not cells[-1].strip():
            cells.pop()
        if len(cells) != len(header):
            has = f"{len(cells)} {'field' if len(cells) == 1 else 'fields'} instead of {len(header)}"
            raise bad(name, f"row {number} has {has}", _QUOTES)
        yield dict(zip(header, cells, strict=True))


def _parsed(text: str, name: str, delimiter: str) -> list[list[str]]:
    """Return the cells of each line. Quotes are doubled in a quoted cell or, as Spark writes them, escaped."""
    styles: tuple[dict[str, Any], ...] = ({}, {"doublequote": False, "escapechar": "\\"})
    problem = ""
    for style in styles if '\\"' in text else styles[:1]:
        try:
            return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, **style))
        except csv.Error as failure:
            problem = problem or str(failure)
    raise bad(name, f"it is no table ({problem})", _QUOTES)


def _delimiter(text: str, usual: str, known: frozenset[str]) -> str:
    """Return the delimiter under which the first line has most known names, or else all lines equally many cells."""

    def fit(delimiter: str) -> tuple[int, bool]:
        try:
            lines = [cells for cells in islice(csv.reader(io.StringIO(text), delimiter=delimiter), _TRIED) if cells]
        except csv.Error:
            return 0, False
        header = lines[0] if lines else []
        is_even = len(header) > 1 and all(len(cells) == len(header) for cells in lines)
        return sum(plain_name(cell) in known for cell in header), is_even

    # max takes the first of equals.
    return max((usual, *(each for each in _DELIMITERS if each != usual)), key=fit)


def _is_header(cells: Sequence[str], known: frozenset[str]) -> bool:
    """Whether a first line names columns: one is known, or all are short, no numbers, and differ."""
    if any(plain_name(cell) in known for cell in cells):
        return True
    named = [cell for cell in cells if cell]
    if len(set(named)) < len(named) or any(len(cell) > 40 or len(cell.split()) > 5 for cell in named):
        return False
    return not any(_is_number(cell) or cell.endswith((".", "!")) for cell in named)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
