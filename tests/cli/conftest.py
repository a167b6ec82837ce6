"""The program as a user starts it, and in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aiakq.cli import main


class Ended(NamedTuple):
    """How a command ended. ``last`` is the last line of its stderr."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.err.rstrip("\n").rpartition("\n")[2]


@pytest.fixture
def aiakq(capsys) -> Callable[..., Ended]:
    """``aiakq(*words)`` runs the command line in this process."""

    def run(*words: str) -> Ended:
        code = main([str(word) for word in words])
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def program() -> Path:
    """The installed command."""
    return Path(sys.executable).with_name("aiakq")


@pytest.fixture
def process(program, tmp_path) -> Callable[..., Ended]:
    """``process(*words, **environment)`` runs the installed command in a process of its own, in an empty folder."""

    def run(*words: str, **environment: str) -> Ended:
        variables: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        done = subprocess.run(
            [str(program), *map(str, words)], capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=120
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run
