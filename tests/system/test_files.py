"""Files that a user names: regular files of a limited size, whatever the path leads to."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from aiakq.system.files import check_named, read_named, read_named_text


class Bad(Exception):
    """The error of a test."""


@pytest.fixture
def things(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    yield tmp_path
    listener.close()


@pytest.mark.parametrize("name", ["pipe", "link", "loop", "socket", ".", "absent", "a\0b", "/dev/zero", "/dev/null"])
def test_what_is_no_regular_file_is_refused_at_once(things, name):
    for read in (lambda path: read_named(path, 10, Bad), lambda path: check_named(path, Bad)):
        with pytest.raises(Bad):
            read(things / name)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    file = tmp_path / "file"
    file.write_bytes("\ufefftext".encode())
    (tmp_path / "link").symlink_to(file)
    assert read_named_text(tmp_path / "link", 7, Bad) == "text"
    for limit, reason in ((6, "larger than 6 B"), (2 << 20, None)):
        file.write_bytes(b"x" * (limit + 1))
        with pytest.raises(Bad, match=reason or "larger than 2 MiB"):
            read_named(file, limit, Bad)
    file.write_bytes(b"\xff")
    with pytest.raises(Bad, match="not UTF-8"):
        read_named_text(file, 10, Bad)
    assert check_named(Path(file), Bad) is None
