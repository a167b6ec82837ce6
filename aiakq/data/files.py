"""Files of calibration data as bytes and as text, decompressed and checked."""

from __future__ import annotations

import ast
import bz2
import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from aiakq.errors import AiakqError, error
from aiakq.system.files import IS_LFS_POINTER, LFS_POINTER, read_named

HINT = (
    "Give a UTF-8 text file; .jsonl, .json, .csv or .parquet with text or messages; or a data set of the hub "
    "(org/name[:config][:split]) or saved in a folder."
)
#: Maximum bytes read: far more than any calibration uses.
MAX_BYTES = 1 << 30
_SMALLER = "A few megabytes are plenty."
#: Suffixes of files that are tables of rows.
TABLES = (".csv", ".tsv", ".parquet", ".pq", ".arrow", ".feather")
#: Suffixes of compressed files.
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
#: First bytes of files that are no text, and what they are.
_SIGNATURES = (
    (b"\x1f\x8b", "a gzip file without the suffix .gz"),
    (b"BZh", "a bzip2 file without the suffix .bz2"),
    (b"\xfd7zXZ", "an xz file without the suffix .xz"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file without the suffix .zst"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "a Parquet file without the suffix .parquet"),
    (b"ARROW1", "an Arrow file without the suffix .arrow"),
    (b"\x93NUMPY", "an array of NumPy"),
    (b"%PDF", "a PDF file"),
)
#: Control characters that texts do not hold.
_CONTROLS = dict.fromkeys(each for each in range(32) if chr(each) not in "\t\n\v\f\r\b\x1b")
#: Characters of a text that are checked for control characters.
_CHECKED = 1 << 20
#: Maximum length of a text that is read as a Python literal, whose parser needs a hundred times the memory.
_MAX_LITERAL = 1 << 20


def bad(source: str, reason: str, hint: str = HINT) -> AiakqError:
    """Return the error for unusable calibration data."""
    return error("calibration", source=source, reason=reason, hint=hint)


def file_kind(path: Path) -> str:
    """Return the suffix that says what a file contains, without that of compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_text(path: Path, hint: str) -> str:
    """Return the text of a file in UTF-8 or, with a byte order mark, UTF-16. Raises ``calibration``."""
    content = read_bytes(path, hint)
    for signature, title in _SIGNATURES:
        if content.startswith(signature):
            raise bad(path.name, f"it is {title}", hint)
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise bad(path.name, f"it is not UTF-8 text (line {line})", hint) from None
    start = text[:_CHECKED]
    if len(start) - len(start.translate(_CONTROLS)) > 0.3 * len(start):
        raise bad(path.name, "it holds control characters: UTF-16 needs a byte order mark", hint)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_bytes(path: Path, hint: str) -> bytes:
    """Return the content of a file of limited size, decompressed as its suffix says. Raises ``calibration``."""
    if not path.exists():
        raise bad(str(path), "there is no such file", hint)

    def unreadable(reason: str) -> AiakqError:
        return bad(path.name, reason, _SMALLER if "larger" in reason else hint)

    content = read_named(path, MAX_BYTES, unreadable)
    if content.startswith(LFS_POINTER):
        raise unreadable(IS_LFS_POINTER)
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return content
    title, opened = _decompressors()[suffix]
    try:
        with opened(io.BytesIO(content)) as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        raise bad(path.name, f"it is no {title} file", hint) from None
    if len(content) > MAX_BYTES:
        raise unreadable("it is larger than 1 GiB")
    return content


def _decompressors() -> dict[str, tuple[str, Callable[[BinaryIO], io.BufferedIOBase]]]:
    """Return the title of each kind of compression and what opens a stream of it."""
    import pyarrow

    return {
        ".gz": ("gzip", lambda stream: gzip.GzipFile(fileobj=stream)),
        ".bz2": ("bzip2", bz2.BZ2File),
        ".xz": ("xz", lzma.LZMAFile),
        ".zst": ("Zstandard", lambda stream: pyarrow.CompressedInputStream(stream, "zstd")),
    }


def decoded_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def decoded_literal(text: str) -> Any:
    """Return the value of a JSON text or, as pandas writes lists to CSV, of a Python literal; None for other texts."""
    value = decoded_json(text)
    if value is not None or len(text) > _MAX_LITERAL:
        return value
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
