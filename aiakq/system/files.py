"""Reading of files that a user names: regular files only, at most a given size. Standard library only."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

#: What is in the place of a large file in a clone without Git LFS: its first bytes, and what messages say of it.
LFS_POINTER = b"version https://git-lfs"
IS_LFS_POINTER = "it is a git-lfs pointer, not the file (run git lfs pull)"
#: Returns the exception for a reason like ``it is a folder``.
Bad = Callable[[str], Exception]
#: What a path can name instead of a file.
_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a named pipe"),
    (stat.S_ISSOCK, "it is a socket"),
    (stat.S_ISCHR, "it is a device"),
    (stat.S_ISBLK, "it is a device"),
)


def open_named(path: Path, bad: Bad) -> BinaryIO:
    """Open a regular file, also through links. Raises ``bad(reason)`` for anything else."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        raise bad(problem.strerror or str(problem)) from None
    except ValueError:  # a zero byte in the name
        raise bad("no file can have this name") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise bad(next((reason for matches, reason in _KINDS if matches(mode)), "it is not a regular file"))
    return os.fdopen(descriptor, "rb")


def check_named(path: Path, bad: Bad) -> None:
    """Check that a library can open a regular file of this name. Raises as ``open_named``."""
    open_named(path, bad).close()


def read_named(path: Path, limit: int, bad: Bad) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises as ``open_named``."""
    with open_named(path, bad) as stream:
        try:
            content = stream.read(limit + 1)
        except OSError as problem:
            raise bad(problem.strerror or str(problem)) from None
    if len(content) > limit:
        unit, shift = next(
            (unit, shift) for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)) if limit >> shift
        )
        size = f"{limit >> shift} {unit}"
        raise bad(f"it is larger than {size}")
    return content


def read_named_text(path: Path, limit: int, bad: Bad) -> str:
    """Return the text of a regular UTF-8 file of at most ``limit`` bytes. Raises as ``open_named``."""
    try:
        return read_named(path, limit, bad).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise bad("it is not UTF-8 text") from None


def lines_of(text: str) -> list[str]:
    """Return the lines of a file with a record in each. ``str.splitlines`` also splits at U+2028, U+0085 and others,
    which JSON may have within a string.
    """
    return text.replace("\r\n", "\n").split("\n")


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in the user's cache for files that can be made again."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aiakq"
